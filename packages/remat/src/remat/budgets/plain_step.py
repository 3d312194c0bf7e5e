"""What a fraction is of, where a step has several regions: plain autograd's peak of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Basis", "PlainStep"]

Basis = Literal["measured", "in proportion", "predicted"]


@dataclass(eq=False)
class PlainStep:
    """The most that plain autograd takes for a step of a model, of the steps that were seen.

    One step is measured. Steps of other calls count in proportion to what their regions keep if
    they store everything. Where no step can be measured, one counts with the peak that is predicted
    of storing everything. `peak_bytes` is 0 while nothing is known.
    """

    peak_bytes: int = 0
    basis: Basis = "measured"
    _reference: tuple[int, int] = (0, 0)

    def know(self, peak_bytes: int, kept_bytes: int, basis: Basis) -> None:
        """Take the peak of a step whose regions keep so many bytes if they store everything."""
        self.peak_bytes, self.basis = peak_bytes, basis
        self._reference = peak_bytes, kept_bytes

    def see(self, kept_bytes: int) -> None:
        """Count a step whose regions keep so many bytes if they store everything."""
        peak, kept = self._reference
        expected = -(-peak * kept_bytes // max(1, kept))
        if expected > self.peak_bytes:
            self.peak_bytes = expected
            if self.basis == "measured":
                self.basis = "in proportion"
