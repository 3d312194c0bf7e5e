"""Which outputs of a model are computed from which others of its outputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from remat_graph.torch import Call, Program

__all__ = ["InnerReads", "inner_reads"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class InnerReads:
    """Outputs that others are computed from: positions in `program.outputs`, by one in `returned`.

    `by` has those that what stands there is computed from, the nearest alone, `of` those that are
    made of it and read so. Keys are in the order of computation. `of_inputs` are those
    that are views of inputs.
    """

    by: Mapping[int, tuple[int, ...]]
    of: Mapping[int, tuple[int, ...]]
    of_inputs: tuple[int, ...]


def inner_reads(program: Program, differentiable: Collection[int]) -> InnerReads | None:
    """Find what is computed from outputs with gradients, if there are any others.

    Positions in `program.returned` are looked at that are `differentiable`. Complexity: one pass
    over the forward half.
    """
    outputs = {
        at: output
        for at, output in enumerate(program.outputs)
        if output.kind in ("fresh", "view", "input_view") and output.requires_grad
    }
    if len(differentiable) < 2 and all(o.kind != "input_view" for o in outputs.values()):
        return None
    storage = program.storage
    own: dict[str, int] = {}  # by value, a bit for each position
    for position in differentiable:
        value = storage[program.returned[position]]
        own[value] = own.get(value, 0) | 1 << position
    needed = dict(own)  # for what is at these positions
    read: dict[str, int] = {}  # by variable
    made: list[str] = []  # values, last to first
    for call in _forward(program):
        results = [n for n in call.results if n is not None and _is_real(program, n)]
        bits = 0
        for name in results:
            bits |= needed.get(storage[name], 0)
            made.append(storage[name])
        names = (n for n in call.reads if n in storage and not _detached(program, n))
        for name in names if bits else ():
            read[name] = read.get(name, 0) | bits
            needed[storage[name]] = needed.get(storage[name], 0) | bits
    order = [position for value in reversed(made) for position in _in_order(program, own, value)]
    by: dict[int, list[int]] = {position: [] for position in order}
    of: dict[int, list[int]] = {position: [] for position in order}
    of_inputs = []
    for at, output in outputs.items():
        is_of = _is_view_of if output.kind == "input_view" else _is_of
        bits = 0
        for name, readers in read.items():
            if is_of(program, name, output.variable):
                bits |= readers
        if output.kind == "input_view":
            for position in _positions(bits):
                by[position].append(at)
            of_inputs += [at] if bits else []
            continue
        base, alike = program.returned.index(output.base), own.get(storage[output.variable], 0)
        computed = [*_positions(bits & ~alike)]
        for position in _positions(alike & ~(1 << base)):  # as the parts of a split
            if program.view_chain(program.returned[position], output.variable) is not None:
                computed.append(position)
        for position in computed:
            by[position].append(at)
        if computed:
            of[base].append(at)
    return InnerReads(_nearest(by, of), _frozen(of), tuple(of_inputs))


def _nearest(
    by: Mapping[int, list[int]], of: Mapping[int, list[int]]
) -> dict[int, tuple[int, ...]]:
    """Leave out what is read through another output, which stands between in autograd's graph."""
    position = {at: position for position, outputs in of.items() for at in outputs}
    nearest = {}
    for reader, outputs in by.items():
        through = (by[position[at]] for at in outputs if at in position)
        beyond = set().union(*through)
        nearest[reader] = tuple(at for at in outputs if at not in beyond)
    return nearest


def _in_order(program: Program, own: Mapping[str, int], value: str) -> list[int]:
    """List the positions of a value, each after those that it is a view of."""
    names = {position: program.returned[position] for position in _positions(own.get(value, 0))}
    depth = {position: _depth(program, name) for position, name in names.items()}
    return sorted(names, key=depth.__getitem__)


def _depth(program: Program, name: str) -> int:
    depth = 0
    while name in program.views:
        name, depth = program.views[name].reads[0], depth + 1
    return depth


def _frozen(lists: dict[int, list[int]]) -> dict[int, tuple[int, ...]]:
    return {position: tuple(items) for position, items in lists.items()}


def _forward(program: Program) -> Iterator[Call]:
    """Go through the calls of the forward half, last to first."""
    for op in reversed(program.order):
        call = program.calls.get(op)
        if call is not None and op not in program.backward_ops and op not in program.alternatives:
            yield call


def _positions(bits: int) -> Iterator[int]:
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def _is_real(program: Program, name: str) -> bool:
    dtype = program.facts[name].dtype
    return dtype.is_floating_point or dtype.is_complex


def _detached(program: Program, name: str) -> bool:
    """Whether a variable is a view through `detach`."""
    while name in program.views:
        if program.views[name].target is aten.detach.default:
            return True
        name = program.views[name].reads[0]
    return False


def _is_of(program: Program, name: str, output: str) -> bool:
    """Whether a variable is a view of an output, or views all of the same memory."""
    if program.storage[name] != program.storage.get(output):
        return False
    sizes = [math.prod(program.facts[variable].shape) for variable in (name, output)]
    return sizes[0] == sizes[1] or _is_view_of(program, name, output)


def _is_view_of(program: Program, name: str, output: str) -> bool:
    return program.view_chain(name, output) is not None
