"""Calls run whole and slice by slice, and compared."""

import torch
from torch.utils import _pytree as pytree

from remat_graph.torch import Body, Call, TensorFacts, Variable
from remat_graph.torch.operators import placements
from remat_graph.torch.slices import linear
from remat_graph.torch.slices.placement import SUMMED, Summed
from remat_graph.torch.ways.slice_by_slice import SlicedBody

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def call_of(target, args, kwargs):
    """A call with variables in place of tensors, the tensors, and what is known of all."""
    tensors = {}

    def named(item):
        name = next((n for n, known in tensors.items() if known is item), f"t{len(tensors)}")
        tensors[name] = item
        return Variable(name)

    args, kwargs = pytree.tree_map_only(torch.Tensor, named, (tuple(args), kwargs))
    return args, kwargs, tensors


def whole_of(target, args, kwargs):
    made = target(*args, **kwargs)
    sequence = isinstance(made, (tuple, list))
    parts = list(made) if sequence else [made]
    args, kwargs, tensors = call_of(target, args, kwargs)
    results = {f"r{i}": p for i, p in enumerate(parts) if isinstance(p, torch.Tensor)}
    names = tuple(f"r{i}" if f"r{i}" in results else None for i in range(len(parts)))
    facts = {name: TensorFacts.of(t.contiguous()) for name, t in (tensors | results).items()}
    return Call(target, args, kwargs, names, sequence), facts, tensors, results


def check(d, target, args, kwargs=None):
    """Compare all ways of running a call in slices with the whole; give the ways."""
    call, facts, tensors, results = whole_of(target, args, kwargs or {})
    ways = placements(call, facts)
    for way in ways:
        if Summed() in way.inputs:
            check_sums(d, call, way, tensors, results)
        else:
            units = way.units(call, facts)
            outputs = tuple(name for name in call.results if name is not None)
            sliced = SlicedBody(Body(tuple(tensors), (call,), outputs), (way,), units, facts)
            made = sliced.run(tuple(tensors.values()), d.cuts(units))
            for name, part in zip(outputs, made, strict=True):
                compare(part, results[name], (call, way))
    return ways


def check_sums(d, call, way, tensors, results):
    """Compare what a call makes of a sum with the sum of what it makes of addends."""
    assert not way.is_sliced
    summed = {n for n, p in zip(call.variables, way.inputs, strict=True) if p == SUMMED}
    count = d.int(1, 4)
    parts = {name: d.indices(count, *tensors[name].shape) for name in summed}
    totals = None
    for at in range(count):
        addends = {name: torch.where(parts[name] == at, tensors[name], 0) for name in summed}
        made = run(call, tensors | addends)
        totals = made if totals is None else [a + b for a, b in zip(totals, made, strict=True)]
    for name, total, place in zip(call.results, totals, way.outputs, strict=True):
        assert place == SUMMED
        compare(total, results[name], (call, way))


def run(call, tensors):
    args, kwargs = pytree.tree_map_only(
        Variable, lambda item: tensors[item.name], (call.args, call.kwargs)
    )
    made = call.target(*args, **kwargs)
    return list(made) if call.sequence else [made]


def check_linear(target, args, kwargs=None):
    """Where a call is linear in some tensors, twice these give twice its results, to the bit."""
    call, _, tensors, results = whole_of(target, args, kwargs or {})
    numbers = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    for variables in (*({name} for name in numbers), set(numbers)):
        if linear.is_linear(call, variables):
            made = run(call, tensors | {name: 2 * tensors[name] for name in variables})
            for name, part in zip(call.results, made, strict=True):
                if name is not None:
                    torch.testing.assert_close(
                        part, 2 * results[name], rtol=0, atol=0, equal_nan=True
                    )


def compare(found, expected, what):
    assert found.shape == expected.shape, what
    assert found.dtype == expected.dtype, what
    if expected.is_floating_point():
        limit = TOLERANCE.get(expected.dtype, 1e-2)
        finite = expected[expected.isfinite()]
        scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        torch.testing.assert_close(
            found,
            expected,
            rtol=limit,
            atol=limit * scale,
            equal_nan=True,
            msg=lambda m: f"{what}: {m}",
        )
    else:
        assert torch.equal(found, expected), what
