"""What steps have shown of a region: gradients that came, outputs that were held and read."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, replace

from remat.errors import BudgetWarning
from remat_graph.torch import Capture, LossCost

__all__ = ["Learned", "SeenLoss", "Shown"]

_SURE = 3  # steps in a row that show what no plan has room for
_GOES_BACK = (
    "no plan has room for what a step last asked for of {}: gradients of outputs that earlier ones "
    "did not give, or outputs that it read or held. Steps go on as they were planned before, and "
    "one that asks for it again may take more than the budget: {}"
)
_moments = itertools.count()


@dataclass(frozen=True, slots=True)
class Shown:
    """What backwards and readers have shown of the outputs of a region, by their positions.

    Gradients of some `came` in backwards so far; those of others are `expected` to be missing,
    `None` before it differed from what was planned for. The loop holds all but `released_outputs`
    when a backward begins. Steps make all but `unread`; some of these `was_read` nevertheless.
    """

    came: frozenset[int] = frozenset()
    expected: frozenset[int] | None = None
    released_outputs: frozenset[int] | None = None
    unread: frozenset[int] | None = None
    was_read: frozenset[int] = frozenset()


class Learned:
    """What steps have `shown` of a region, as far as plans have room for it.

    One odd step does not end the training: where nothing has room for what it asked for, that is
    forgotten. Where several in a row ask for it, it is planned for whatever it needs.
    """

    def __init__(self) -> None:
        self.shown = Shown()
        self._earlier: list[tuple[int, Shown]] = []  # which asked for less, and until when
        self._refused: set[Shown] = set()
        self._refused_in_a_row = 0

    def take_over(self, other: Learned) -> None:
        """Know all that another has learned."""
        self.shown = other.shown
        self._earlier, self._refused = [*other._earlier], {*other._refused}

    def see_read(self, position: int) -> bool:
        """Make an output again that is read; give whether that is planned for."""
        before = self.shown
        unread = None if before.unread is None else before.unread - {position}
        shown = replace(before, was_read=before.was_read | {position}, unread=unread)
        if shown in self._refused:
            return False
        self._change(shown, asks_more=unread != before.unread)
        return True

    def see_unread(self, watched: frozenset[int]) -> None:
        """Make outputs no more, but for those that were read, if there is room for these."""
        was_read = self.shown.was_read
        self.shown = replace(self.shown, unread=watched)
        self._change(replace(self.shown, unread=watched - was_read), asks_more=True)

    def leave_out(self, outputs: frozenset[int]) -> None:
        """Note outputs that a plan leaves out, but for those that were read."""
        unread = (self.shown.unread or frozenset()) | (outputs - self.shown.was_read)
        self.shown = replace(self.shown, unread=unread)

    def see_backward(self, shown: Shown, *, asks_more: bool) -> bool:
        """Learn what a backward has shown; give whether that is planned for."""
        self._refused_in_a_row += 1
        if shown not in self._refused:
            self._refused_in_a_row = 0
        elif self._refused_in_a_row < _SURE:
            return False
        self._change(shown, asks_more=asks_more)
        return True

    def _change(self, shown: Shown, *, asks_more: bool) -> None:
        if asks_more and shown != self.shown:
            self._earlier.append((next(_moments), self.shown))
        self.shown = shown

    @property
    def asked_more_at(self) -> int:
        """When a step last asked for more, unless several in a row did, or none: -1."""
        is_sure = self._refused_in_a_row >= _SURE
        return -1 if is_sure or not self._earlier else self._earlier[-1][0]

    def forget_last(self, name: str, error: Exception) -> None:
        """Forget what a step last asked for of a region, which nothing has room for.

        Warns:
            BudgetWarning: in any case.
        """
        self._refused.add(self.shown)
        _, self.shown = self._earlier.pop()
        warnings.warn(_GOES_BACK.format(name, error), BudgetWarning, stacklevel=3)


@dataclass(frozen=True, slots=True)
class SeenLoss:
    """What the code between forward and backward was seen to take, of outputs of so many bytes."""

    cost: LossCost
    of_bytes: int

    @classmethod
    def seen(cls, cost: LossCost, capture: Capture) -> SeenLoss:
        """Note what was seen of the outputs of a capture."""
        return cls(cost, _returned_bytes(capture))

    def of(self, capture: Capture) -> LossCost:
        """Expect the same of outputs of other sizes, in proportion."""
        bytes_, of_bytes = _returned_bytes(capture), self.of_bytes
        if not of_bytes or bytes_ == of_bytes:
            return self.cost
        return LossCost(
            -(-self.cost.workspace_bytes * bytes_ // of_bytes),
            -(-self.cost.kept_bytes * bytes_ // of_bytes),
        )


def _returned_bytes(capture: Capture) -> int:
    values = {capture.program.storage[name] for name in capture.program.held}
    return sum(map(capture.size_of, values))
