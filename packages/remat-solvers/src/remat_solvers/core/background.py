"""A call that no one can interrupt, in a thread of its own, so that Python goes on beside it.

MILP back ends work outside Python, without its global lock. In a thread of their own, Ctrl-C takes
effect at once, and something else can be done on a second core.
Limits: a call cannot be ended. After Ctrl-C, or another error here, it is left to itself until it
ends, at its own limit if it has one, and Python exits only then; a second Ctrl-C, during the exit,
aborts the process. In workers of pools, cores are taken to be in use by the others.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

__all__ = ["in_background"]

_Result = TypeVar("_Result")

_SOON = 1.0  # seconds; shorter calls are only waited for
_TURN, _LONGEST_TURN = 0.25, 2.0  # of the time so far; seconds


def in_background(
    call: Callable[[], _Result], meanwhile: Callable[[float], None] | None = None
) -> _Result:
    """Call, and until that is done, and there is a second core, do something else by turns.

    `meanwhile` is given the seconds of a turn, and may take less. What `call` raises is raised.
    """
    future: Future[_Result] = Future()
    if _cores() < 2:
        meanwhile = None
    started = time.perf_counter()
    threading.Thread(target=_run, args=(call, future), name="remat-solvers back end").start()
    wait([future], _SOON)
    while not future.done():
        now = time.perf_counter()
        turn = min(_TURN * (now - started), _LONGEST_TURN)
        if meanwhile is not None:
            meanwhile(turn)
        wait([future], max(0.0, now + turn - time.perf_counter()))
    try:
        return future.result()
    finally:
        del future  # an error holds this frame


def _run(call: Callable[[], _Result], future: Future[_Result]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # raised again, by whoever waits
        future.set_exception(error)


def _cores() -> int:
    """Count the cores that are left to this thread: all those of the process, or one."""
    in_pool = multiprocessing.parent_process() is not None
    if in_pool or threading.current_thread() is not threading.main_thread():
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
