"""Which MILP back ends are believed: one that was proved wrong is not any more, in this process.

A bound, or that a program is infeasible, is the back end's word: it can be refuted, not checked.
Its points still are of use, since every schedule is simulated.
"""

from __future__ import annotations

import logging

__all__ = ["distrust", "doubt_of"]

_doubts: dict[str, str] = {}  # of each back end that was wrong, how

_log = logging.getLogger(__name__)


def distrust(back_end: str, cause: str) -> str:
    """Believe a back end no more; return the doubt that answers carry for it."""
    if back_end not in _doubts:
        _log.warning("%s is not believed from now on: %s", back_end, cause)
    return _doubts.setdefault(back_end, f"{back_end} was wrong in this process: {cause}")


def doubt_of(back_end: str) -> str | None:
    """Say why a back end is not believed; `None` if it is."""
    return _doubts.get(back_end)
