"""Whether the budget has room for what a step does that its plan was not made for."""

from __future__ import annotations

from dataclasses import dataclass

from remat_exec.codegen import Code
from remat_exec.errors import BudgetExceeded, RepeatExceeded
from remat_exec.on_demand import Recipe
from remat_exec.variant import Variant
from remat_graph import Compute, Schedule, simulate
from remat_graph.torch import Capture

__all__ = ["Room"]

_NAME_IT = "read it after the backward, or name it in outputs=, so that it is planned for"


@dataclass(frozen=True, slots=True)
class Room:
    """What a step by the code of a plan may take: `budget_bytes`, or anything."""

    capture: Capture
    schedule: Schedule
    code: Code
    budget_bytes: int | None

    def check(
        self, variant: Variant, released_outputs: frozenset[int], *, staying: bool = False
    ) -> None:
        """Check that the budget has room for a backward by `variant`, with these outputs freed.

        `staying` says that gradients do not leave which were to.

        Raises:
            BudgetExceeded: if it takes more memory than the budget.
        """
        program = self.capture.program
        read = self.capture.deferred_bytes(program.deferred - released_outputs)
        if read:
            self.check_peak(
                max(self.code.peak_bytes, variant.code.peak_bytes) + read,
                "while an output is held that the plan does not make, and that was read",
                _NAME_IT,
            )
        if variant.program is not program:
            self.check_peak(
                variant.code.peak_bytes,
                "over other outputs than the plan was made for",
                "run forward again, it will be planned anew",
            )
        held = {
            program.storage[program.handed[p]]
            for p in self.capture.released_outputs - released_outputs - program.deferred
        }
        if staying:
            self.check_peak(
                variant.code.staying_peak_bytes,
                "while gradients stay that left at once in earlier ones, as hooks let go of them",
                "run forward again, it will be planned with them held",
            )
        if held:
            self.check_peak(
                self.code.peak_bytes + sum(map(self.capture.size_of, held)),
                "while outputs are held that were let go of before earlier ones",
                "let go of them, or run forward again, it will be planned with them held",
            )

    def check_reading(self, recipe: Recipe) -> None:
        """Check that the budget has room to make an output between the halves.

        Raises:
            BudgetExceeded: if it takes more memory than the budget.
        """
        after = simulate(self.capture.graph, self.schedule).after_bytes
        kept = after[self.schedule.steps.index(Compute("loss")) - 1]
        peak = kept + recipe.peak_bytes
        if self.budget_bytes is not None and peak > self.budget_bytes:
            raise BudgetExceeded(
                f"an output that the plan does not make was read before the backward, which takes "
                f"{peak:,} bytes of a budget of {self.budget_bytes:,}; {_NAME_IT}",
                self.budget_bytes,
                peak,
            )

    def check_running_again(self, given_bytes: int, planned_bytes: int) -> None:
        """Check that the budget has room to run the forward again, while its outputs are held.

        So are `given_bytes` of gradients of earlier backwards. For these, and for outputs that the
        backward reads, which are there twice, `planned_bytes` are planned.

        Raises:
            BudgetExceeded: if it takes more memory than the budget.
        """
        program, steps = self.capture.program, self.schedule.steps
        during = simulate(self.capture.graph, self.schedule).during_bytes
        made = {program.storage[name] for p, name in enumerate(program.handed)
                if p not in program.deferred}  # fmt: skip
        read = {program.storage.get(name, name) for name in self.code.saved}
        both, twice = (sum(map(self.capture.size_of, each)) for each in (made, made & read))
        forward = max(during[: steps.index(Compute("loss"))], default=0)
        room = given_bytes + twice
        more = max(0, room - planned_bytes)
        peak = max(forward + both + given_bytes, self.code.peak_bytes + more)
        if self.budget_bytes is not None and peak > self.budget_bytes:
            raise RepeatExceeded(peak, self.budget_bytes, given_bytes, room)

    def check_peak(self, peak_bytes: int, what: str, instead: str) -> None:
        """Check that the budget has room for a backward, and say what would help.

        Raises:
            BudgetExceeded: if it has not.
        """
        if self.budget_bytes is not None and peak_bytes > self.budget_bytes:
            raise BudgetExceeded(
                f"this backward, {what}, would take {peak_bytes:,} bytes of a budget of "
                f"{self.budget_bytes:,}; {instead}",
                self.budget_bytes,
                peak_bytes,
            )
