"""Undoing what a forward does besides computing, where it is run for planning alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["attributes_restored", "state_restored"]


@contextmanager
def attributes_restored(module: torch.nn.Module) -> Iterator[None]:
    """Put back the attributes of all submodules, and what is in their lists, dicts and sets.

    The plan of the module itself, which is ours, stays what it became.
    """
    before = [(part, _contents(part.__dict__)) for part in module.modules()]
    before[0][1].pop("plan", None)
    try:
        yield
    finally:
        for part, contents in before:
            attributes = part.__dict__
            for key in attributes.keys() - contents.keys() - {"plan"}:
                del attributes[key]
            for key, (value, inner) in contents.items():
                if inner is not None:
                    _refill(value, inner)
                attributes[key] = value


@contextmanager
def state_restored(module: torch.nn.Module) -> Iterator[None]:
    """Put back attributes, buffers, and all global random states of torch, Python and numpy."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    numpy = sys.modules.get("numpy")
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    cuda = [device for device in devices if device.type == "cuda"]
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=cuda), attributes_restored(module):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        with torch.no_grad():
            for buffer, data in buffers:
                if not torch.equal(buffer, data):
                    buffer.copy_(data)


def _contents(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    kinds = (list, dict, set)
    return {
        key: (value, value.copy() if isinstance(value, kinds) else None)
        for key, value in attributes.items()
    }


def _refill(value: Any, contents: Any) -> None:
    if isinstance(value, list):
        value[:] = contents
    else:
        value.clear()
        value.update(contents)
