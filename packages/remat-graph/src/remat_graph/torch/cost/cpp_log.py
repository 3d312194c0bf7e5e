"""Keeps torch's C++ log from a line that recordings cause, and nobody else can do anything about.

Where a block of memory that is older than a recording is released during it, the allocator logs
"Memory block of unknown size was allocated before the profiling started", once a second. The level
of that log is of the process and has no door in Python; warnings of Python's, which is what torch
makes of its own in a step, do not pass through it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from pathlib import Path

import torch

__all__ = ["Hush"]

_ERROR = 2
_lock = threading.RLock()  # the collector may end another's within it


class Hush:
    """Lets through errors alone between `begin` and `end`, while any of these is between them."""

    _going_on = 0
    _before = 0

    def __init__(self) -> None:
        self._is_begun = False

    def begin(self) -> None:
        """Begin, unless it is begun."""
        level = _level()
        if self._is_begun or level is None:
            return
        with _lock:
            if not Hush._going_on:
                Hush._before = level.value
                level.value = max(_ERROR, level.value)
            self._is_begun = True
            Hush._going_on += 1

    def end(self) -> None:
        """End, if it is begun."""
        if not self._is_begun:
            return
        level = _level()
        with _lock:
            self._is_begun = False
            Hush._going_on -= 1
            if level is not None and not Hush._going_on:
                level.value = Hush._before

    def __del__(self) -> None:
        """End, where the thread that began has ended."""
        self.end()


@functools.cache
def _level() -> ctypes.c_int | None:
    """Find the level in torch's library, of a build that has its own log."""
    for name in ("libc10.so", "libc10.dylib", "c10.dll"):
        with contextlib.suppress(OSError, ValueError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    return None
