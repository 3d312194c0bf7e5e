"""A call that no one can interrupt, in a thread of its own, so that Python goes on beside it.

MILP back ends work outside Python, without its global lock. In a thread of their own, Ctrl-C takes
effect at once, and something else can be done on a second core.
Limits: after Ctrl-C, or another error here, the call is left to itself; it ends at its own limit.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

__all__ = ["in_background"]

_SOON = 0.2  # seconds; shorter calls are only waited for
_TURN = 0.25  # of the time so far, for one turn


def in_background(
    call: Callable[[], object], meanwhile: Callable[[float], None] | None = None
) -> None:
    """Call, and until that is done, and there is a second core, do something else by turns.

    `meanwhile` is given the seconds of a turn, and may take less. What `call` raises is raised.
    """
    raised: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again, in the thread that waits
            raised.append(error)
        finally:
            done.set()

    if _cores() < 2:
        meanwhile = None
    started = time.perf_counter()
    threading.Thread(target=run, name="remat-solvers back end", daemon=True).start()
    turn = _SOON
    while not done.wait(turn):
        if meanwhile is not None:
            now = time.perf_counter()
            turn = max(_SOON, _TURN * (now - started))
            meanwhile(turn)
            turn = max(turn - (time.perf_counter() - now), 0.0)
    if raised:
        raise raised[0]


def _cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
