"""The first step by each plan of a region that is alone: recorded, and held against the budget.

What the code between forward and backward takes, most often a loss, is in no graph: a plan allows
it so much, measured or guessed. One that takes more is seen here, told of, and planned for.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from remat.budgets.blocks import or_with_expandable_segments
from remat.errors import BudgetWarning
from remat.planning.planner import Planned
from remat.plans.reads import read_by_backward
from remat.session.recording import StepRecording, gradients_present
from remat_graph.torch import Capture, LossCost, Mark

if TYPE_CHECKING:
    from remat.session.region import Region

__all__ = ["FirstSteps", "PlannedCall", "SeenLoss"]

_OTHER_BLOCKS = ", or its tensors got larger blocks than those of the step that was measured"


@dataclass(frozen=True, slots=True)
class SeenLoss:
    """What the code between forward and backward was seen to take, of outputs of so many bytes."""

    cost: LossCost
    of_bytes: int

    def of(self, capture: Capture) -> LossCost:
        """Expect the same of outputs of other sizes, in proportion."""
        bytes_, of_bytes = _returned_bytes(capture), self.of_bytes
        if not of_bytes or bytes_ == of_bytes:
            return self.cost
        return LossCost(
            -(-self.cost.workspace_bytes * bytes_ // of_bytes),
            -(-self.cost.kept_bytes * bytes_ // of_bytes),
        )


@dataclass(eq=False)
class PlannedCall:
    """A call of a region that is alone, by a plan for these numbers; what its backward showed."""

    region: Region
    numbers: Hashable
    planned: Planned
    missing: frozenset[int] | None = field(default=None, init=False)
    released_outputs: frozenset[int] = field(default=frozenset(), init=False)


class FirstSteps:
    """Records the steps by plans that have not been seen to stay within their budget."""

    def __init__(self) -> None:
        self._recording = StepRecording(self._judge)
        self._begun: weakref.ref[PlannedCall] | None = None
        self._call: PlannedCall | None = None
        self._was_over = False

    @property
    def is_recording(self) -> bool:
        """Whether a step is recorded."""
        return self._recording.under_way

    def begin(self, call: PlannedCall, tensors: Sequence[torch.Tensor]) -> None:
        """Record the step that begins with a call, if it is of use.

        It is of none where gradients are there already: what was there before does not count, but
        may be let go of in the step.
        """
        region, numbers = call.region, call.numbers
        checked = region.checked.get(numbers) is call.planned.plan or numbers in region.left
        if checked or gradients_present(tensors):
            return
        self._recording.start(call.planned.capture.program.device)
        self._begun = weakref.ref(call, self._dropped)

    def returned(self) -> None:
        """Note that the forward is done."""
        self._recording.mark("kept")

    def backward(self, call: PlannedCall) -> None:
        """Note that the backward of a call begins."""
        if self._begun is not None and self._begun() is call:
            self._call = call
            self._recording.mark("backward")
            self._recording.await_end()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _dropped(self, _: object) -> None:
        """Record no further where no backward can follow."""
        if self._call is None and torch._C._current_graph_task_id() == -1:
            self.stop()

    def finish(self) -> None:
        """Judge the step that was recorded, if one was to its end; record no more of it.

        Not within a backward, where a checkpoint runs a forward again: it is part of the step.

        Warns:
            BudgetWarning: if it took more than the budget.
        """
        if torch._C._current_graph_task_id() != -1:
            return
        try:
            if self._recording.ended:
                self._judge()
        finally:
            self.stop()

    def rest(self) -> None:
        """Judge a step that has ended where a forward without gradients runs after it."""
        if self._recording.ended:
            self.finish()

    def stop(self) -> None:
        """Drop what was recorded."""
        self._begun = self._call = None
        self._recording.stop()

    def _judge(self) -> None:
        """See whether a recorded step stayed within the budget.

        Warns:
            BudgetWarning: if it took more.
        """
        marks, call, self._call = self._recording.read(), self._call, None
        if call is None or call.missing != call.planned.capture.missing:
            return  # a backward that was not planned for; the next plan is
        if [mark.label for mark in marks] != ["start", "kept", "backward", "end"]:
            return
        region, planned = call.region, call.planned
        budget, device = planned.plan.budget_bytes, planned.capture.program.device
        most = max(mark.peak_bytes for mark in marks)
        seen, allowed = _loss_seen(planned, marks, call.released_outputs), planned.capture.loss
        expected = seen.at_least(allowed)
        over = expected != allowed and (
            marks[-2].peak_bytes > budget
            or (most > budget and expected.kept_bytes > allowed.kept_bytes)
        )
        if expected != allowed:
            cost = SeenLoss(expected, _returned_bytes(planned.capture))
            region.see_loss(cost, planned.plan if over else None)
        if over:
            why = (
                f"the code between its forward and its backward, such as a loss, takes "
                f"{seen.kept_bytes + seen.workspace_bytes:,} bytes beside the gradients of the "
                f"outputs, where {allowed.kept_bytes + allowed.workspace_bytes:,} were allowed. "
                f"Its gradients are right, and from the next forward on this is planned for; with "
                f"loss= it is at once"
            )
        elif most > budget:
            if not self._was_over:  # what an optimizer keeps is new but once
                self._was_over = True
                return
            why = (
                f"something that no plan knows of takes memory in it, such as hooks of parameters"
                f"{_OTHER_BLOCKS * (device.type == 'cuda')}. "
                f"Its gradients are right; ask for so much less"
                f"{or_with_expandable_segments(device)}"
            )
        region.checked[call.numbers] = planned.plan
        if most > budget:
            more = f"{most - budget:,} more than the budget of {budget:,}"
            warnings.warn(f"a step took {most:,} bytes, {more}: {why}", BudgetWarning, stacklevel=2)


def _loss_seen(
    planned: Planned, marks: Sequence[Mark], released_outputs: frozenset[int]
) -> LossCost:
    """Read off a record what the code between forward and backward took."""
    _, kept, backward, _ = marks
    capture = planned.capture
    program, sizes = capture.program, capture.graph.value_by_name
    gradients = {program.storage[name] for name in program.tangents}
    before = kept.held_bytes + sum(sizes[value].size_bytes for value in gradients)
    gone = capture.released_values(released_outputs) - read_by_backward(
        capture.graph, planned.plan.schedule
    )
    freed = sum(sizes[value].size_bytes for value in gone)
    held = max(0, backward.held_bytes + freed - before)
    return LossCost(max(0, backward.peak_bytes - before - held), held)


def _returned_bytes(capture: Capture) -> int:
    sizes = capture.graph.value_by_name
    values = {capture.program.storage[name] for name in capture.program.returned}
    return sum(sizes[value].size_bytes for value in values if value in sizes)
