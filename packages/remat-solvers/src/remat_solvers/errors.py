"""What `remat_solvers` raises: what happened, with which value, and what would work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from remat_graph import RematError, Schedule, Status

__all__ = [
    "BackEndFailed",
    "BrokenSolver",
    "BudgetTooSmall",
    "DuplicateSolver",
    "InvalidProblem",
    "SolverError",
    "UnknownSolver",
    "UnsuitableSolver",
    "WorkerDied",
    "format_bytes",
]


class SolverError(RematError, ValueError):
    """Base of the errors of this package; they travel between processes."""

    def __reduce__(self) -> tuple[Callable[..., SolverError], tuple[Any, ...], dict[str, Any]]:
        """Make it again of its message: what it was made of is in its attributes."""
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(kind: type[SolverError], args: tuple[Any, ...]) -> SolverError:
    error = kind.__new__(kind)
    error.args = args
    return error


class InvalidProblem(SolverError):
    """A budget or limit that is no number, a foreign hierarchy, an executor that takes nothing.

    Or a graph whose sizes cannot be added up.
    """


class UnknownSolver(SolverError):
    """No installed distribution offers a solver of this name."""


class DuplicateSolver(SolverError):
    """Two distributions offer a solver of the same name."""


class BrokenSolver(SolverError):
    """A solver that cannot be loaded, failed, or gave an answer that does not hold."""

    def __init__(self, name: str, origin: str, cause: str) -> None:
        super().__init__(
            f"solver {name!r} of {origin} is broken: {cause}; "
            f"report it there, or use another solver"
        )
        self.name = name
        self.origin = origin


class BackEndFailed(SolverError):
    """A back end for integer programs that gave no answer at all, as one without a licence does."""

    def __init__(self, back_end: str, columns: int, error: Exception) -> None:
        why = str(error).partition(". Try another")[0] or type(error).__name__
        help_ = "use another back end"
        if back_end == "GUROBI":
            help_ = (
                "the licence that comes with gurobipy takes 2,000 variables: install your own, or "
                "use back_end='HIGHS'"
            )
        elif back_end != "HIGHS":
            help_ = "see whether its licence is installed, or use back_end='HIGHS'"
        super().__init__(
            f"back end {back_end!r} failed on a program of {columns:,} variables ({why}); {help_}"
        )
        self.back_end = back_end


class UnsuitableSolver(SolverError):
    """A solver that says it cannot take this problem."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"solver {name!r} cannot take this problem: {reason}")
        self.name = name
        self.reason = reason


class WorkerDied(SolverError):
    """An executor that lost sub-problems: a worker of it died, or it was shut down meanwhile.

    `tasks` are the names of those that were lost; the one at fault is among them, as a rule the
    first.
    """

    def __init__(self, tasks: Sequence[str], cause: str) -> None:
        others = f" (nor were {len(tasks) - 1} more)" if len(tasks) > 1 else ""
        super().__init__(
            f"a worker died, or was taken away, before {tasks[0]!r} was solved{others}: {cause}; "
            f"give the executor fewer workers or more memory, or solve here with executor=None"
        )
        self.tasks = tuple(tasks)


class BudgetTooSmall(SolverError):
    """Nothing within the budget exists, or was found within the limit.

    `smallest_bytes` is the lowest peak of any schedule found; `least_bytes` is a proved lower bound
    on the peak of every schedule in the order of the graph, 0 if none is; `least_at` is the op
    that cannot run with less, if it is known. `results_bytes` is what the results of the graph
    take, such as the gradients of parameters, all of which are there at the end. `status` is
    `INFEASIBLE` if it is proved that nothing fits, `LIMIT` if nothing was found. `schedule`, where
    it is known, is one that takes `smallest_bytes`: with it as `start`, `solve` has an answer for
    that budget, whatever a search finds that is cut short by the clock.
    """

    def __init__(
        self,
        budget_bytes: int,
        smallest_bytes: int,
        least_bytes: int,
        least_at: str | None,
        status: Status,
        results_bytes: int = 0,
        schedule: Schedule | None = None,
    ) -> None:
        budget, smallest = _distinct(budget_bytes, smallest_bytes)
        held_by_results = 2 * results_bytes > least_bytes
        if smallest_bytes > budget_bytes:
            claim = f"is below {smallest}, the smallest any schedule found needs"
            smaller = "train fewer parameters" if held_by_results else "make the batch smaller"
            help_ = f"raise the budget or {smaller}"
        else:
            claim = f"was not met by this solver, though a schedule of {smallest} exists"
            help_ = "use another solver, such as 'auto', give it more time, or raise the budget"
        reached = f", needed to run op {least_at!r}" if least_at else ""
        least = format_bytes(least_bytes)
        proof = f" (no schedule in the order of the graph can go below {least}{reached}"
        if held_by_results:
            results = format_bytes(results_bytes)
            proof += f"; its results, such as gradients of parameters, are {results}"
        proof = f"{proof})" if least_bytes else ""
        super().__init__(f"budget {budget} {claim}{proof}; {help_}")
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.least_bytes = least_bytes
        self.least_at = least_at
        self.status = status
        self.results_bytes = results_bytes
        self.schedule = schedule


def format_bytes(count: int) -> str:
    """Write a number of bytes for people, with three significant digits."""
    if count < 1000:
        return f"{count} B"
    size = count / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def _distinct(first: int, second: int) -> tuple[str, str]:
    texts = format_bytes(first), format_bytes(second)
    if first != second and texts[0] == texts[1]:
        return f"{first} B", f"{second} B"
    return texts
