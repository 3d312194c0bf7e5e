"""How far rounding alone leads: eager beside eager whose weights differ in their last bits.

All is in double precision. What rounds elsewhere, as compiled groups do, is as right as eager with
weights that are a last bit larger or smaller. Mostly that is some 1e-12; a batch norm of nearly
equal numbers makes more of it, and each step of training more of that of the step before. What is
wrong differs by a share of the gradient itself, in the first step already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from matrix_cases.case import Built, tensors_in
from matrix_cases.training import Trained, error, train

__all__ = ["beyond_rounding", "in_double"]

RIGHT = 1e-10
TIMES = 10  # what weights that are changed by a last bit lead to: groups round at many places
MOST = 1e-5  # no more is allowed, however ill-conditioned a model is
SHAKES = 3


def in_double(calls: Sequence[Built]) -> list[Built]:
    """Give the same calls with all numbers in double precision."""

    def doubled(built: Built) -> Built:
        to_double = {
            tensor: tensor.detach().double().requires_grad_(tensor.requires_grad)
            for tensor in (*tensors_in([built.args, built.kwargs]), *built.leaves)
            if tensor.is_floating_point()
        }
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: to_double.get(tensor, tensor), (built.args, built.kwargs)
        )
        leaves = tuple(to_double.get(leaf, leaf) for leaf in built.leaves)
        return replace(built, model=built.model.double(), args=args, kwargs=kwargs, leaves=leaves)

    once = {id(call): doubled(call) for call in calls}
    return [once[id(call)] for call in calls]


def beyond_rounding(
    build: Callable[[], list[Built]], ours: Trained, plain: Trained
) -> tuple[str, str]:
    """Say how far a training is from eager, and where further than rounding leads, or nothing.

    All of them are of what `build` makes, in double precision.
    """
    shaken = [train(_shaken(build(), seed), peak=False) for seed in range(SHAKES)]
    told, beyond = [], ""
    for number in range(len(plain.steps)):
        noise = max(_in_step(number, each, plain)[0] for each in shaken)
        off, where = _in_step(number, ours, plain)
        told.append(f"{off:.0e} ({noise:.0e})")
        if not off <= max(RIGHT, min(MOST, TIMES * noise)) and not beyond:
            beyond = f"{off:.1e} in double precision, where rounding leads to {noise:.1e}, {where}"
    return ", ".join(told), beyond


def _in_step(number: int, found: Trained, expected: Trained) -> tuple[float, str]:
    first, second = (Trained(steps=[trained.steps[number]]) for trained in (found, expected))
    off, where = error(first, second)
    return off, where.replace("step 1", f"step {number + 1}")


def _shaken(calls: list[Built], seed: int) -> list[Built]:
    """Change each weight by a last bit, or not."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in calls[0].model.parameters():
            if weight.is_floating_point():
                bits = torch.randint(-1, 2, weight.shape, generator=generator)
                weight.mul_(1 + bits.to(weight.dtype) * torch.finfo(weight.dtype).eps)
    return calls
