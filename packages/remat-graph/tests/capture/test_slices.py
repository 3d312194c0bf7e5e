"""Each operator's rule on random inputs: whole against slices, along every axis it admits."""

from inspect import isfunction

import pytest
import torch
from graph_cases.samples import SAMPLES, Draw
from graph_cases.samples.elementwise import OF_THEIR_OWN, POINTWISE, by_schema, in_a_type_taken
from graph_cases.slicing import check, check_linear, run, whole_of
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_graph.torch import Body, Call, TensorFacts, Variable
from remat_graph.torch.operators import placements
from remat_graph.torch.slices import linear
from remat_graph.torch.slices.placement import Sliced
from remat_graph.torch.slices.rules import RULES
from remat_graph.torch.ways.slice_by_slice import SlicedBody, _part

aten = torch.ops.aten


@pytest.mark.parametrize("target", [t for t in POINTWISE if t not in OF_THEIR_OWN], ids=str)
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_pointwise(target, data):
    d = Draw(data.draw)
    args = in_a_type_taken(target, by_schema(d, target))
    assert args is not None
    ways = check(d, target, args)
    shape = torch.broadcast_shapes(*(a.shape for a in args if isinstance(a, torch.Tensor)))
    check_linear(target, args)
    alone = [way for way in ways if not way.outputs[0].joined]
    assert len(alone) == sum(size > 1 for size in shape)


def test_batch_and_tokens_are_cut_as_one_where_each_row_is_made_by_itself():
    x, weight = torch.rand(4, 6, 8), torch.rand(8)
    cases = [
        (aten.gelu.default, [x], {0, 1, 2}),
        (aten.native_layer_norm.default, [x, [8], weight, weight, 1e-5], {0, 1}),
        (aten._softmax.default, [x, 1, False], {0, 2}),
        (aten.bmm.default, [x, x.mT.contiguous()], {0}),
    ]
    for target, args, apart in cases:
        call, facts, _, _ = whole_of(target, args, {})
        outputs = [way.outputs[0] for way in placements(call, facts)]
        joined = {place for place in outputs if isinstance(place, Sliced) and place.joined}
        assert (Sliced(1, joined=1) in joined) == ({0, 1} <= apart)
        assert (Sliced(2, joined=2) in joined) == ({0, 1, 2} <= apart)
    call, facts, _, _ = whole_of(aten.view.default, [x, [24, 8]], {})
    views = {(way.inputs[0], way.outputs[0]) for way in placements(call, facts)}
    assert {(Sliced(0), Sliced(0)), (Sliced(1, joined=1), Sliced(0))} <= views


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.slice_scatter.default, [torch.rand(3, 1, 4), torch.rand(3, 0, 4), 1, 1, 1]),
        (aten.slice_backward.default, [torch.rand(3, 0, 4), [3, 1, 4], 1, 1, 1, 1]),
    ],
    ids=["slice_scatter", "slice_backward"],
)
def test_axes_are_not_cut_as_one_around_an_axis_along_which_a_part_is_empty(target, args):
    call, facts, _, _ = whole_of(target, args, {})
    outputs = [way.outputs[0] for way in placements(call, facts)]
    assert Sliced(2) in outputs
    assert not any(place.joined for place in outputs if isinstance(place, Sliced))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_axes_that_lie_apart_are_cut_as_one_all_the_same(order):
    x = torch.rand(3, 4, 5).permute(order)
    x = torch.empty(x.shape).copy_(x).permute(sorted(range(3), key=order.__getitem__))
    call = Call(aten.neg.default, (Variable("x"),), {}, ("y",), False)
    facts = {"x": TensorFacts.of(x), "y": TensorFacts.of(x)}
    way = next(w for w in placements(call, facts) if w.outputs[0] == Sliced(1, joined=1))
    sliced = SlicedBody(Body(("x",), (call,), ("y",)), (way,), 12, facts)
    (made,) = sliced.run([x], [0, 1, 6, 12])
    assert torch.equal(made, -x)
    assert made.stride() == x.stride()


def test_every_rule_has_samples_or_runs_on_cuda_alone():
    assert RULES.keys() - SAMPLES.keys() - set(POINTWISE) == {target for target, *_ in CUDA}


TARGETS = pytest.mark.parametrize(
    "target", SAMPLES, ids=lambda each: each.__qualname__ if isfunction(each) else str(each)
)


def check_sample(d, target):
    args, kwargs = SAMPLES[target](d, target)
    check(d, target, args, kwargs)
    check_linear(target, args, kwargs)


@TARGETS
@settings(max_examples=5, deadline=None)
@given(st.data())
def test_slices_make_up_the_whole(target, data):
    check_sample(Draw(data.draw), target)


@pytest.mark.sweep
@TARGETS
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_slices_of_more_samples_make_up_the_whole(target, data):
    check_sample(Draw(data.draw), target)


def test_what_is_linear_has_samples():
    assert SAMPLES.keys() | set(POINTWISE) >= linear.LINEAR


@pytest.mark.parametrize(
    ("target", "args", "variables", "expected"),
    [
        (aten.mul.Tensor, [1, 2], {1, 2}, False),
        (aten.mul.Tensor, [1, 2], {2}, True),
        (aten.add.Tensor, [1, 2], {1}, False),
        (aten.add.Tensor, [1, 2], {1, 2}, True),
        (aten.add.Tensor, [1, 3.0], {1}, False),
        (aten.div.Tensor, [1, 2], {2}, False),
        (aten.where.ScalarOther, [0, 1, 0.0], {1}, True),
        (aten.where.ScalarOther, [0, 1, 0.5], {1}, False),
        (aten.masked_fill.Scalar, [1, 0, 0], {1}, True),
        (aten.masked_fill.Scalar, [1, 0, 1], {1}, False),
        (aten.clamp.default, [1, 0.2], {1}, False),
        (aten.tanh_backward.default, [1, 2], {1}, True),
        (aten.tanh_backward.default, [1, 2], {2}, False),
        (aten.tanh_backward.default, [1, 1], {1}, False),
    ],
)
def test_what_is_linear(target, args, variables, expected):
    """Variables are written as integers here, but for the number behind a mask."""
    tensors = {at for at, item in enumerate(target._schema.arguments) if "Tensor" in str(item.type)}
    given = (
        Variable(f"v{item}") if at in tensors and isinstance(item, int) else item
        for at, item in enumerate(args)
    )
    call = Call(target, tuple(given), {}, ("result",), False)
    assert linear.is_linear(call, {f"v{each}" for each in variables}) == expected


def meta(*shape, dtype=torch.float16):
    return torch.empty(shape, dtype=dtype, device="meta")


def attentions(batch):
    """What CUDA has for attention, and the backward of it, of tensors without data."""
    x, seed = meta(batch, 6, 32, 64), meta(dtype=torch.int64)
    sums, mask = meta(batch, 6, 32, dtype=torch.float32), meta(1, 6, 32, 32)
    flash, efficient, cudnn = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    yield flash, [x, x, x]
    yield efficient, [x, x, x, mask.expand(batch, -1, -1, -1), True]
    yield cudnn, [x, x, x, None, True]
    rest = [0.0, False, seed, seed]
    yield f"{flash}_backward", [x, x, x, x, x, sums, None, None, 32, 32, *rest]
    rest = [seed, seed, 0.0, [True, True, True, False]]
    yield f"{efficient}_backward", [x, x, x, x, mask, x, sums, *rest]
    rest = [seed, seed, mask, None, None, 32, 32, 0.0, False]
    yield f"{cudnn}_backward", [x, x, x, x, x, sums[..., None], *rest]


X, W = meta(4, 6), meta(6, 8)
CUDA = [  # with how many axes can be cut
    *((getattr(aten, name).default, args, 1) for name, args in attentions(batch=4)),
    *((getattr(aten, name).default, args, 1) for name, args in attentions(batch=1)),
    (aten.mm.dtype, [X, W, torch.float32], 3),
    (aten.addmm.dtype, [meta(8), X, W, torch.float32], 2),
    (aten.bmm.dtype, [X[None], W[None], torch.float32], 3),
    (aten._fused_rms_norm_backward.default, [X, X, [6], X[:, :1], W[:, 0], [True, True]], 1),
]


@pytest.mark.parametrize(("target", "args", "count"), CUDA, ids=lambda item: str(item)[:60])
def test_slices_of_what_runs_on_cuda_alone_have_the_shapes_of_parts(target, args, count):
    call, facts, tensors, results = whole_of(target, args, {})
    ways = [way for way in placements(call, facts) if way.is_sliced]
    assert len(ways) == count
    for way in ways:
        units = way.units(call, facts)
        places = dict(zip(call.variables, way.inputs, strict=True))
        parts = {
            name: part_of(tensor, places[name], units, units - 1)
            for name, tensor in tensors.items()
        }
        made = run(way.call_for(call, units - 1, units), parts)
        for name, part, place in zip(call.results, made, way.outputs, strict=True):
            if name is not None:
                assert part.shape == part_of(results[name], place, units, units - 1).shape


def part_of(tensor, place, units, count):
    return _part(tensor, place, units, 0, count)
