"""Where a step may stand, and what leads from where to where.

    OPEN ────forward───► FORWARD ───return───► RETURNED ───backward──┐
                                                                     ▼
                            AGAIN ◄──forward─── BACKWARD, which OPEN leads to, too,
                              └──────return────────► ▲               where no forward is seen

From RETURNED another forward of the same step leads to FORWARD; a backward within a forward leads
to AGAIN: it differentiates within itself. AGAIN is also another forward of a step whose backward
has begun. A new step may begin wherever no forward is under way, and leads to OPEN. Where
`torch.compile` runs regions, no forward is seen: calls come while the step is OPEN or in BACKWARD.
All moves are in `NEXT`; any other is an error.
"""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["NEXT", "Phase"]


class Phase(Enum):
    """Where a step stands."""

    OPEN = auto()
    FORWARD = auto()
    RETURNED = auto()
    BACKWARD = auto()
    AGAIN = auto()


NEXT = {
    "begin": {Phase.OPEN: Phase.OPEN, Phase.RETURNED: Phase.OPEN, Phase.BACKWARD: Phase.OPEN},
    "forward": {
        Phase.OPEN: Phase.FORWARD,
        Phase.RETURNED: Phase.FORWARD,
        Phase.BACKWARD: Phase.AGAIN,
    },
    "return": {Phase.FORWARD: Phase.RETURNED, Phase.AGAIN: Phase.BACKWARD},
    "backward": {
        Phase.OPEN: Phase.BACKWARD,
        Phase.FORWARD: Phase.AGAIN,
        Phase.RETURNED: Phase.BACKWARD,
        Phase.BACKWARD: Phase.BACKWARD,
        Phase.AGAIN: Phase.AGAIN,
    },
}
