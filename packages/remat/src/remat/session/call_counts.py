"""Whether the next step has several calls before a backward, or one that has the whole budget.

A model of one region is planned for both, each in its own way, and steps of both may come in turn:
two views of a batch now and then, the two calls of a GAN's discriminator and the one of its
generator. A forward must know which it is before a second one is seen.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CallCounts"]

_PATIENCE = 3  # steps of one call in a row, after which such steps are expected
_SURE = 2  # steps of several calls in a row, which others most likely follow


@dataclass(eq=False)
class _After:
    """The steps that followed those of one kind: how many in a row had one call, or several."""

    patience: int
    lone: int = 0
    several: int = 0

    @property
    def expects_several(self) -> bool:
        return self.lone < self.patience

    def see(self, *, several: bool) -> None:
        if several and not self.expects_several:
            self.patience = max(_PATIENCE, 2 * self.patience)
        self.several = (self.several + 1) * several
        self.lone = (self.lone + 1) * (not several)


class CallCounts:
    """Which steps had several calls, and whether the next one is expected to.

    It is if one of the last steps had that followed a step like the one before. Where that is
    wrong, the step takes longer than it must; to expect too few calls takes it over the budget, so
    more steps are looked at each time that happens. `met_several` says that some step had several.
    """

    def __init__(self) -> None:
        self.met_several = False
        self._last = False
        self._after = {False: _After(0), True: _After(_PATIENCE)}

    def end_step(self, *, several: bool) -> None:
        """See a step that had a backward."""
        self._after[self._last].see(several=several)
        self._last = several
        self.met_several |= several

    @property
    def expects_several(self) -> bool:
        """Whether the next step may have several calls."""
        return self._after[self._last].expects_several

    @property
    def is_sure(self) -> bool:
        """Whether it most likely has."""
        return self._after[self._last].several >= _SURE
