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
    they store everything, but with no more than is predicted of storing everything: what does not
    grow with them, as gradients of parameters, would grow in proportion, too. Where no step can be
    measured, one counts with that prediction. `peak_bytes` is 0 while nothing is known.
    """

    peak_bytes: int = 0
    basis: Basis = "measured"
    _reference: tuple[int, int] = (0, 0)
    _largest: tuple[int, int] = (0, 0)

    def know(self, peak_bytes: int, kept_bytes: int, basis: Basis) -> None:
        """Take the peak of a step whose regions keep so many bytes if they store everything."""
        self.peak_bytes, self.basis = peak_bytes, basis
        self._reference = self._largest = peak_bytes, kept_bytes

    def see(self, kept_bytes: int, stored_peak_bytes: int) -> None:
        """Count a recorded step whose regions keep so many bytes if they store everything.

        The peak is that which is predicted of it then.
        """
        peak, kept = self._reference
        in_proportion = -(-peak * kept_bytes // max(1, kept))
        expected = min(in_proportion, stored_peak_bytes)
        if kept_bytes > self._largest[1]:
            self._largest = expected, kept_bytes
        if expected > self.peak_bytes:
            self.peak_bytes = expected
            if self.basis == "measured":
                self.basis = "in proportion"

    def with_(self, kept_bytes: int) -> int:
        """Give the most, also of a step that keeps so many bytes and was not recorded yet.

        Of such a step no more is known than that it keeps more than the largest that was.
        """
        peak, kept = self._largest
        return max(self.peak_bytes, peak + kept_bytes - kept) if self.peak_bytes else 0
