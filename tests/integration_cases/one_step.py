"""A step that tests of several regions take again and again."""

import copy
from typing import Any

import torch

from remat_exec import measure_peak

__all__ = ["X", "peak_of", "run", "steps"]

X = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))


def run(model):
    model.zero_grad()
    model(X).backward()


def steps(model: torch.nn.Module, rows: tuple[int, ...], width: int) -> list[Any]:
    """Give the loss, the gradients and the random state of a step on so many rows each."""
    seen = list[Any]()
    for at, size in enumerate(rows):
        model.zero_grad()
        torch.manual_seed(at)
        loss = model(torch.randn(size, width))
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        seen.append((loss.detach(), copy.deepcopy(grads), torch.get_rng_state()))
    return seen


def peak_of(model):
    model.zero_grad()
    with measure_peak() as peak:
        model(X).backward()
    return peak.peak_bytes
