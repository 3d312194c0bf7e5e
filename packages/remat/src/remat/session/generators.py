"""Generators of random numbers as they were before a forward that is run again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["generators_as_they_are"]


def generators_as_they_are() -> Callable[[], None]:
    """Give what puts back the global generators of torch, Python and NumPy as they are now."""
    generators = (torch.default_generator, *torch.cuda.default_generators)
    states = [each.get_state().numpy().tobytes() for each in generators]  # a tensor would count
    of_python = random.getstate()
    numpy: Any = sys.modules.get("numpy.random")
    of_numpy = None if numpy is None else numpy.get_state()

    def put_back() -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        random.setstate(of_python)
        if numpy is not None:
            numpy.set_state(of_numpy)

    return put_back
