"""What belongs to the process and not to a thread: one lock around it, and putting it back.

Tracing and measuring set flags of torch, filters of warnings and random generators, which all
threads share. Whoever does so holds `process_lock`, so that each puts back what was there before
it. It is taken before torch's own lock around compilations, never after.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["collector_at_rest", "generators_restored", "process_lock", "quietly"]

process_lock = threading.RLock()


@contextmanager
def quietly() -> Iterator[None]:
    """Silence all warnings; other threads wait, for the filters are one list."""
    with process_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Look for no cycles of objects: each search goes through all that torch has loaded.

    For work that holds no data: what is left in cycles is freed after it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def generators_restored() -> Iterator[None]:
    """Put back the global generators of torch, of the CPU and of all CUDA devices in use."""
    generators = (torch.default_generator, *torch.cuda.default_generators)
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
