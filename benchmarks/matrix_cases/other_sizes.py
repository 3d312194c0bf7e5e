"""Steps of a case whose inputs are of another size each.

Which sizes of the inputs may change is found by trying in plain eager: all dimensions of one size
together, as those of the length of a text are, or else the first of each input, as of a batch, and
the others apart. Eager has run with each size that is drawn, by itself and with all drawn beside
it. Inputs are repeated to be larger, and cut to be smaller.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from matrix_cases.case import Built, seed_everything, tensors_in

__all__ = ["SizesOfSteps", "draw_sizes"]

STEPS = 10
_TRIED = 6  # sizes of an axis, beside the two by which it is seen whether it may change
_DRAWS = 8  # of the sizes of a step, until eager runs with one

Place = tuple[int, int]  # an input, and one of its dimensions


@dataclass(frozen=True, slots=True)
class _Axis:
    """Dimensions of inputs that are of one size, and change together."""

    size: int
    places: frozenset[Place]


@dataclass(frozen=True, slots=True)
class SizesOfSteps:
    """What was drawn: the axes that may change, and the size of each in each step."""

    axes: tuple[_Axis, ...]
    steps: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        """List the sizes of each axis, by step."""
        return "; ".join(" ".join(map(str, sizes)) for sizes in zip(*self.steps, strict=True))

    def calls(self, built: Built) -> list[Built]:
        """Give the call of each step."""
        return [_resized(built, self.axes, sizes) for sizes in self.steps]


def draw_sizes(build: Callable[[], Built], seed: int) -> SizesOfSteps:
    """Draw the sizes of each step of a case; those of the first are the case's own."""
    built, draw = build(), random.Random(seed)
    leaves = _leaves(built)
    found: dict[_Axis, list[int]] = {}
    for size in dict.fromkeys(size for leaf in leaves for size in _shape(leaf) if size > 1):
        axis, *parts = _axes(leaves, size)
        found[axis] = _sizes_that_run(built, axis, draw)
        if not found[axis]:
            found |= {part: _sizes_that_run(built, part, draw) for part in parts}
    found = {axis: [axis.size, *sizes] for axis, sizes in found.items() if sizes}
    axes, steps = tuple(found), [tuple(axis.size for axis in found)]
    while len(steps) < STEPS:
        drawn = (tuple(map(draw.choice, found.values())) for _ in range(_DRAWS))
        steps.append(next((s for s in drawn if _runs(_resized(built, axes, s))), steps[0]))
    return SizesOfSteps(axes, tuple(steps))


def _axes(leaves: list[Any], size: int) -> list[_Axis]:
    """Take all dimensions of a size together; and, if some are first ones, these and the others."""
    places = {
        (position, dim)
        for position, leaf in enumerate(leaves)
        for dim, extent in enumerate(_shape(leaf))
        if extent == size
    }
    firsts = {(position, dim) for position, dim in places if dim == 0}
    parts = [firsts, places - firsts] if 0 < len(firsts) < len(places) else []
    return [_Axis(size, frozenset(each)) for each in (places, *parts)]


def _sizes_that_run(built: Built, axis: _Axis, draw: random.Random) -> list[int]:
    """List other sizes of an axis with which eager runs: from half of its own to half more.

    There are none if it runs with neither end of these.
    """
    least, most = axis.size // 2, axis.size + (axis.size + 1) // 2
    between = [size for size in range(least + 1, most) if size not in (1, axis.size)]
    found: list[int] = []
    for tried in [{least, most} - {1}, draw.sample(between, min(_TRIED, len(between)))]:
        found += [size for size in sorted(tried) if _runs(_resized(built, (axis,), (size,)))]
        if not found:
            break
    return found


def _runs(built: Built) -> bool:
    """Tell whether eager can take a step, with numbers for a loss and for gradients."""
    if _reads_past_the_end(built):
        return False
    built.model.zero_grad(set_to_none=True)
    seed_everything(0)
    try:
        loss = built.loss(built.model(*built.args, **built.kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception:
        return False
    gradients = [p.grad for p in (*built.model.parameters(), *built.leaves) if p.grad is not None]
    return all(bool(each.isfinite().all()) for each in (loss, *gradients))


def _reads_past_the_end(built: Built) -> bool:
    """Tell whether torch would read beyond an input of a CTC loss, which it does not check."""
    if not isinstance(built.model, nn.CTCLoss):
        return False
    scores, targets, _, lengths = built.args
    needed = int(torch.as_tensor(lengths).sum() if targets.dim() == 1 else max(lengths))
    return bool(targets.shape[-1] < needed or int(targets.max()) >= scores.shape[-1])


def _is_leaf(value: object) -> bool:
    """Take a list of what one batch holds, such as the boxes of each image, as one input."""
    return isinstance(value, list) and any(True for _ in tensors_in(value))


def _leaves(built: Built) -> list[Any]:
    return tree_flatten((built.args, built.kwargs), is_leaf=_is_leaf)[0]


def _shape(leaf: object) -> tuple[int, ...]:
    if isinstance(leaf, list):
        return (len(leaf),)
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        return tuple(leaf.shape)
    return ()


def _resized(built: Built, axes: tuple[_Axis, ...], sizes: tuple[int, ...]) -> Built:
    """Give a call with axes of other sizes."""
    leaves, spec = tree_flatten((built.args, built.kwargs), is_leaf=_is_leaf)
    inputs: list[Tensor] = []
    for axis, size in zip(axes, sizes, strict=True):
        for position, dim in axis.places:
            leaves[position] = _repeated(leaves[position], dim, size)
    for position, leaf in enumerate(_leaves(built)):
        if any(leaf is each for each in built.leaves):
            leaves[position] = leaves[position].detach().clone().requires_grad_()
            inputs.append(leaves[position])
    args, kwargs = tree_unflatten(leaves, spec)
    return replace(built, args=args, kwargs=kwargs, leaves=tuple(inputs))


def _repeated(leaf: Any, dim: int, size: int) -> Any:
    if isinstance(leaf, list):
        return [leaf[position % len(leaf)] for position in range(size)]
    return leaf.index_select(dim, torch.arange(size) % leaf.shape[dim])
