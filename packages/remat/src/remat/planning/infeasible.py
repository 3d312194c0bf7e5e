"""What happens where a call, or a step of several regions, has no plan within the budget."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Literal, get_args

from remat.errors import BudgetWarning, RematError
from remat_exec import BudgetExceeded, SecondDerivative
from remat_solvers import BudgetTooSmall

__all__ = [
    "NotPlanned",
    "OnInfeasible",
    "across_breaks",
    "check_on_infeasible",
    "warn_infeasible",
    "without_graph",
]

OnInfeasible = Literal["raise", "plain"]


class NotPlanned:
    """Stands where the plan would be."""

    def __init__(self, reason: str = "not made yet; it is made at the first training call") -> None:
        self.reason = reason

    def save(self, path: str | os.PathLike[str]) -> None:
        """Refuse to write a plan that there is not.

        Raises:
            RematError: always.
        """
        raise RematError(f"there is no plan to write to {os.fspath(path)!r}: {self.reason}")

    def __str__(self) -> str:
        return f"remat plan: {self.reason}"

    __repr__ = __str__


def check_on_infeasible(on_infeasible: object) -> None:
    """Refuse what is no `OnInfeasible`.

    Raises:
        RematError: with those that there are.
    """
    if on_infeasible not in get_args(OnInfeasible):
        there_are = " or ".join(map(repr, get_args(OnInfeasible)))
        raise RematError(f"on_infeasible={on_infeasible!r}; give {there_are}")


def warn_infeasible(what: str, error: RematError) -> NotPlanned:
    """Warn that something runs without a plan, over the budget, why, and what would help.

    What is given says so, too.
    """
    will = "will" if isinstance(error, (BudgetTooSmall, BudgetExceeded)) else "may"
    reason = "\n".join([str(error), *getattr(error, "__notes__", ())])
    text = f"{what} runs without a plan, and {will} take more than the budget: {reason}"
    warnings.warn(text, BudgetWarning, stacklevel=2)
    return NotPlanned(text)


def without_graph(breaks: Sequence[str]) -> RematError:
    """Say that a forward ran without a plan, since none of it was in a graph that has one."""
    reason = "; ".join(breaks[-3:]) or (
        "is it switched off, by torch.compiler.set_stance or torch._dynamo.config.disable?"
    )
    return RematError(
        f"the forward ran as it is, without a plan: TorchDynamo made no graph of it "
        f"that could be planned ({reason}); train this module without remat"
    )


def across_breaks(breaks: Sequence[str]) -> SecondDerivative:
    """Say that a forward asks for a gradient of a gradient, and no graph of it has both."""
    reason = f" ({breaks[-1]})" if breaks else ""
    return SecondDerivative(
        f"the forward asks for a gradient of a gradient across a break of its graph{reason}, which "
        f"a plan does not give; without the break it is planned. If the forward has changed since "
        f"its first step, rematerialize it anew: then it may run as it is"
    )
