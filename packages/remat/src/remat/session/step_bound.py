"""What a step takes at least, by the options of its calls alone, without a record.

What a call keeps between its halves and takes in one of them is its option's to say, and the
gradients that regions have given are there to see. What eager code holds beside them is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from remat.session.calls import Call, NewGradients
from remat.session.judge import Judge
from remat.session.recording import StepRecording
from remat_graph.torch import Mark

__all__ = ["StepBound"]

_FIRST_BACKWARD = "differentiated"


class StepBound:
    """Warns of steps over the budget that no record will show."""

    def __init__(
        self,
        judge: Judge,
        recording: StepRecording,
        pattern: Callable[[], tuple[int, ...]],
    ) -> None:
        self._judge, self._recording, self._pattern = judge, recording, pattern
        self._most = self._told = self._steps = 0
        self._recorded_from = 0
        self._before_record: int | None = 0
        self._gradients: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def see(self, open_calls: Iterable[Call], needed: int, own: Call | None = None) -> None:
        """See so many bytes needed beside what open calls keep, in the backward of its `own`."""
        budget = self._judge.known_budget()
        if budget is None:
            return
        others = [call for call in open_calls if call is not own]
        gradients = self._gradients.values()
        at_most = sum(call.kept_bytes for call in others) + needed
        at_most += sum(size for _, size in gradients)
        if at_most > max(budget, self._most):
            at_least = sum(call.kept_bytes - call.handed.gone_bytes() for call in others)
            at_least += needed if own is None else needed - own.handed.gone_bytes(own.let_go)
            at_least += sum(size for parameter, size in gradients if _has(parameter(), size))
            self._most = max(self._most, at_least if at_least > budget else 0)
        if own is not None and self._most > self._told:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_ended)

    def record_from(self, position: int) -> None:
        """Note that the step is recorded from this call on."""
        self._recorded_from, self._before_record = position, None

    def backward_begins(self, open_calls: Iterable[Call]) -> None:
        """See what calls from before the record keep when the first backward begins."""
        if self._before_record is None:
            self._recording.mark(_FIRST_BACKWARD)
            self._before_record = sum(
                call.kept_bytes - call.handed.gone_bytes()
                for call in open_calls
                if call.position < self._recorded_from
            )

    def at_least(self, marks: Sequence[Mark]) -> int:
        """Give what a step took at least that was recorded in part.

        What calls from before keep when the first backward begins they have kept until then.
        """
        peaks = [mark.peak_bytes for mark in marks]
        began = (at for at, mark in enumerate(marks) if mark.label == _FIRST_BACKWARD)
        forward = peaks[: 1 + next(began, -1)]
        return max([self._most, *peaks, (self._before_record or 0) + max(forward, default=0)])

    def give(self, gradients: NewGradients) -> None:
        """Note that the backward of a call has given out its gradients."""
        self._gradients.update(gradients.of)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _backward_ended(self) -> None:
        if not self._recording.is_running:
            self.tell(self._pattern())

    def tell(self, pattern: tuple[int, ...]) -> None:
        """Warn of the step of these calls, if it is over the budget by more than warned before."""
        if self._most > self._told:
            self._told = self._most
            self._judge.warn_unrecorded(self._most, self._steps + 1, pattern)

    def begin_step(self, steps: int) -> None:
        """Begin a step after so many."""
        self._most = self._told = 0
        self._steps = steps
        self._gradients = {}
        self._before_record = 0


def _has(parameter: torch.Tensor | None, size: int) -> bool:
    """Whether it has a gradient with memory of its own, which no bucket is."""
    gradient = None if parameter is None else parameter.grad
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.untyped_storage().nbytes() == size
    )
