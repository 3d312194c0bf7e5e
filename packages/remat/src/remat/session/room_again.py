"""What plans leave for another backward over one forward."""

from __future__ import annotations

import math
from dataclasses import dataclass

from remat_exec import RepeatExceeded

__all__ = ["RoomAgain"]


@dataclass(eq=False)
class RoomAgain:
    """The bytes that are left in plans: for all that is held in another backward, if a plan fits.

    Else for the gradients of those before alone, or for nothing.
    """

    bytes: int = 0
    _less: int = 0
    _asked: float = 0

    def ask(self, error: RepeatExceeded) -> bool:
        """Leave what another backward needs; say whether that is new, and may be planned for."""
        if error.room_bytes <= self._asked:
            return False
        self.bytes = self._asked = error.room_bytes
        self._less = error.given_bytes if error.given_bytes < error.room_bytes else 0
        return True

    def give_up(self) -> bool:
        """Leave less from now on, as no plan has room for it; say whether anything was left."""
        was_left, self.bytes, self._less = self.bytes > 0, self._less, 0
        if was_left:
            self._asked = math.inf
        return was_left
