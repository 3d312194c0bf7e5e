"""A call that no one can interrupt, in a thread of its own, so that Python goes on beside it.

MILP back ends work outside Python, without its global lock. In a thread of their own, Ctrl-C takes
effect at once, and something else can be done on a second core.
Limits: after Ctrl-C, or another error here, the call is left to itself until it ends at its own
limit; Python exits only then, as HiGHS aborts a process that ends around it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

__all__ = ["in_background"]

_Result = TypeVar("_Result")

_SOON = 0.2  # seconds; shorter calls are only waited for
_TURN = 0.25  # of the time so far, for one turn


def in_background(
    call: Callable[[], _Result], meanwhile: Callable[[float], None] | None = None
) -> _Result:
    """Call, and until that is done, and there is a second core, do something else by turns.

    `meanwhile` is given the seconds of a turn, and may take less. What `call` raises is raised.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    if _cores() < 2:
        meanwhile = None
    started = time.perf_counter()
    threading.Thread(target=run, name="remat-solvers back end").start()
    wait([future], None if meanwhile is None else _SOON)
    while meanwhile is not None and not future.done():
        now = time.perf_counter()
        turn = max(_SOON, _TURN * (now - started))
        meanwhile(turn)
        wait([future], max(0.0, now + turn - time.perf_counter()))
    return future.result()


def _cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
