"""Cuts that make their gradients in the forward, for a tangent of one.

Where the backward stretch of a cut reads of the backward half nothing but one number, the gradient
of a loss, it gives that number times what it gives for one. So the forward stretch can make both,
slice by slice: what is inside is made once instead of twice, and the gradients are there from then
on. In the backward they are scaled. What a mean divides by is summed before.

The condition is checked op by op: each must be linear in the gradient. In float16 gradients of a
scaled loss are small on purpose; for a tangent of one they would be lost, so such stretches are
made again. Source: Liger-Kernel (Hsu and others 2024), section 3.2, by hand for one loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from remat_graph.torch.calls import Body, Call, TensorFacts
from remat_graph.torch.kernels.cross_entropy import cross_entropy
from remat_graph.torch.kernels.unit_tangent import total_weight
from remat_graph.torch.program import Program
from remat_graph.torch.slices.linear import is_linear
from remat_graph.torch.slices.placement import SUMMED, WHOLE, Place, Placement
from remat_graph.torch.ways.slice_by_slice import SlicedBody

__all__ = ["UnitTangent", "for_unit_tangent"]

aten = torch.ops.aten

_NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, cross_entropy)

_Step = tuple[Call, Placement]


@dataclass(frozen=True, slots=True)
class UnitTangent:
    """What the two stretches of a cut are if gradients are made in the forward.

    `body` gives what the forward stretch gives and, for a `tangent` of one, the `gradients` that
    the backward stretch gives. `totals` make what it reads of all slices, by the variable.
    """

    body: SlicedBody
    tangent: str
    gradients: tuple[str, ...]
    totals: Mapping[str, SlicedBody]


def for_unit_tangent(
    program: Program, forward: SlicedBody, backward: SlicedBody
) -> UnitTangent | None:
    """Join the two stretches of a cut, so that gradients are made in the forward, if it can be."""
    inside = _made(forward)
    totals = _totals(forward, backward)
    outside = [name for name in backward.body.inputs if name not in totals]
    of_backward = _values_of_backward(program)
    coming = [name for name in outside if program.storage.get(name) in of_backward]
    if (
        len(coming) != 1
        or math.prod(program.facts[coming[0]].shape) != 1
        or not inside.isdisjoint(outside)
        or _depend(program, set(outside).difference(coming), forward)
        or not _agree(forward.places, backward.places, totals)
    ):
        return None
    tangent = coming[0]
    own = [step for step in _steps(backward) if inside.isdisjoint(step[0].results)]
    of_tangent = _linear_in(tangent, own)
    if of_tangent is None or not of_tangent.issuperset(backward.body.outputs):
        return None
    facts = {**forward.facts, **backward.facts}
    if any(facts[name].dtype is torch.float16 for name in of_tangent):
        return None
    one = facts[tangent]
    fixed = {"dtype": one.dtype, "device": one.device}
    filled = Call(aten.full.default, (list(one.shape), 1.0), fixed, (tangent,), sequence=False)
    steps = [
        (filled, Placement((), (WHOLE,))),
        *(_without(step, totals) for step in _steps(forward)),
        *own,
    ]
    given = (name for name in forward.body.outputs if name not in totals)
    joined = _body(steps, (*given, *backward.body.outputs), forward.units, facts)
    return UnitTangent(joined, tangent, backward.body.outputs, totals)


def _steps(sliced: SlicedBody) -> list[_Step]:
    return list(zip(sliced.body.calls, sliced.placements, strict=True))


def _body(
    steps: Sequence[_Step], outputs: tuple[str, ...], units: int, facts: Mapping[str, TensorFacts]
) -> SlicedBody:
    results = {name for call, _ in steps for name in call.results}
    reads = dict.fromkeys(name for call, _ in steps for name in call.reads if name not in results)
    body = Body(tuple(reads), tuple(call for call, _ in steps), outputs)
    return SlicedBody(body, tuple(way for _, way in steps), units, facts)


def _made(sliced: SlicedBody) -> set[str]:
    return {name for call in sliced.body.calls for name in call.results if name is not None}


def _values_of_backward(program: Program) -> set[str]:
    """Name the values that come to the backward half, or are made in it."""
    values = {program.storage[name] for name in program.tangents}
    for op in program.backward_ops & program.calls.keys():
        results = program.calls[op].results
        values.update(program.storage[name] for name in results if name is not None)
    return values


def _depend(program: Program, names: Collection[str], forward: SlicedBody) -> bool:
    """Whether some of these are made of what a stretch makes, and so are not there before it."""
    storage, inside = program.storage, _made(forward)
    reached = {storage[name] for name in inside}
    reached -= {storage[name] for name in forward.body.inputs if name in storage}
    for op in program.order:
        call = program.calls.get(op)
        if call is not None and op not in program.backward_ops:
            results = {name for name in call.results if name is not None}
            if not results <= inside and any(storage.get(name) in reached for name in call.reads):
                reached.update(storage[name] for name in results)
    return any(storage.get(name) in reached for name in names)


def _agree(one: Mapping[str, Place], other: Mapping[str, Place], totals: Collection[str]) -> bool:
    """Whether what both stretches touch stands in the same place in both."""
    return all(one[name] == other[name] for name in one.keys() & other.keys() - set(totals))


def _linear_in(tangent: str, steps: Collection[_Step]) -> set[str] | None:
    """Name what these make of a tangent; `None` if some of it is not linear in the tangent."""
    reached = {tangent}
    for call, _ in steps:
        if not reached.isdisjoint(call.reads):
            if not is_linear(call, reached):
                return None
            reached.update(name for name in call.results if name is not None)
    return reached


def _totals(forward: SlicedBody, backward: SlicedBody) -> dict[str, SlicedBody]:
    """Find the total weights of losses that the backward reads, each with what makes it alone."""
    totals = {}
    for call in forward.body.calls:
        name = call.results[1] if call.target in _NLL else None
        if name is None or name not in backward.body.inputs:
            continue
        target, weight = call.argument("target"), call.argument("weight")
        args = target, weight, call.argument("ignore_index"), forward.facts[name].dtype
        total = Call(total_weight, args, {}, (name,), sequence=False)
        places = tuple(forward.places.get(each, WHOLE) for each in total.variables)
        steps = [*_leading_to(forward, total.variables), (total, Placement(places, (SUMMED,)))]
        totals[name] = _body(steps, (name,), forward.units, forward.facts)
    return totals


def _leading_to(forward: SlicedBody, names: Collection[str]) -> list[_Step]:
    """List the steps that make these variables."""
    read, steps = set(names), list[_Step]()
    for step in reversed(_steps(forward)):
        if not read.isdisjoint(step[0].results):
            steps.append(step)
            read.update(step[0].reads)
    return steps[::-1]


def _without(step: _Step, totals: Collection[str]) -> _Step:
    """Leave out of what a call makes what is made before."""
    call, way = step
    results = tuple(None if name in totals else name for name in call.results)
    return (call if results == call.results else replace(call, results=results)), way
