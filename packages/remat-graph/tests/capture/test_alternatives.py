"""Each alternative makes the bits and the layout of what it stands for; packing loses nothing."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from remat_graph import Compute, Numerics, Schedule, simulate
from remat_graph.torch import (
    AllocationRecorder,
    CaptureError,
    Variable,
    capture,
    read_call,
    tensor_at,
)
from remat_graph.torch.kernels import packing

aten = torch.ops.aten
STRANGE = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 6.0, 1e-45])


def alternatives(module, *args, numerics=Numerics.BITWISE):
    return capture(module.train(), args, costs="estimate").with_alternatives(numerics)


def kinds(captured):
    return {name.rpartition("__")[2] for name in captured.program.alternatives}


def same(made, expected):
    """Whether two tensors have the same bits in the same layout."""
    if made.stride() != expected.stride() or made.dtype != expected.dtype:
        return False
    return torch.equal(made.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def run(captured, module, args, compare=same):
    """Run every op of a program in turn, and compare what alternatives make with what is there."""
    program, tensors = captured.program, read_call(args, {}).tensors
    there = {i.variable: tensor_at(module, tensors, i.kind, i.key) for i in program.inputs}
    there.update(program.constants)
    for name in program.tangents:
        facts = program.facts[name]
        there[name] = torch.randn(facts.shape, dtype=facts.dtype)

    def value(item):
        if not isinstance(item, Variable):
            return item
        if item.name not in there:
            view = program.views[item.name]
            there[item.name] = call(view)[view.results.index(item.name)]
        return there[item.name]

    def call(made):
        is_leaf = lambda item: isinstance(item, Variable)  # noqa: E731
        given = pytree.tree_map(value, (made.args, dict(made.kwargs)), is_leaf=is_leaf)
        result = made.target(*given[0], **given[1])
        return result if made.sequence else [result]

    with torch.no_grad():
        for op in program.order:
            if op not in program.calls:
                continue
            made = call(program.calls[op])
            for name, result in zip(program.calls[op].results, made, strict=True):
                if name is None:
                    continue
                stands_for = op in program.alternatives and program.alternatives[op].of
                if stands_for:
                    assert compare(result, there[name]), (op, name)
                else:
                    there[name] = result


class Activated(nn.Module):
    """Convolutions, with some activation after the first, and then a pooling."""

    def __init__(self, activation, pool, width=8, stride=1):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1, stride=stride)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.activation, self.pool = activation, pool

    def forward(self, x):
        x = self.activation(self.norm(self.first(x)))
        x = self.pool(self.activation(self.second(x)))
        return nn.functional.dropout(x, 0.3)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("activation", "pool", "expected"),
    [
        (nn.ReLU(inplace=True), nn.MaxPool2d(2), {"signs", "by_signs", "offsets"}),
        (nn.ReLU6(), nn.MaxPool2d(3, 2, 1), {"by_other", "signs", "offsets"}),
        (nn.LeakyReLU(), nn.AvgPool2d(2), {"by_other"}),
        (nn.Hardtanh(), nn.AdaptiveAvgPool2d(3), {"by_other", "signs"}),
    ],
    ids=lambda item: type(item).__name__,
)
def test_alternatives_of_convolutional_nets_make_the_same_bits(layout, activation, pool, expected):
    module = Activated(activation, pool)
    x = torch.randn(5, 3, 9, 9).to(memory_format=layout)
    module.to(memory_format=layout)
    found = alternatives(module, x)
    run(found, module, (x,))
    expected = {kind.replace("offsets", "by_offsets") for kind in expected}
    assert {"input", "weight", "packed", "unpacked", *expected} <= kinds(found)
    assert ("by_sizes" in kinds(found)) == (layout is torch.contiguous_format)


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(6, 6, 3, stride=2, groups=6), nn.Conv2d(6, 24, 1), nn.Conv2d(6, 2, 5, dilation=2),
        nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(6, 4, 3, padding=1, bias=False),
    ],
    ids=str,
)  # fmt: skip
def test_a_convolution_backward_in_halves_reads_the_input_for_the_weight_alone(convolution):
    module = nn.Sequential(nn.Linear(11, 11), convolution)
    x = torch.randn(2, 6, 11, 11)
    found = alternatives(module, x)
    run(found, module, (x,))
    ops = {op.name.rpartition("__")[2]: op for op in found.graph.ops if op.alternative_of}
    (kept,) = set(ops["weight"].inputs) - set(ops["input"].inputs)
    assert found.graph.value_by_name[kept].size_bytes == x.nbytes
    assert len(ops["weight"].outputs) == 1 + (convolution.bias is not None)


def test_a_pooling_in_three_dimensions_keeps_offsets():
    module = nn.Sequential(nn.Linear(7, 7), nn.MaxPool3d((2, 3, 2), (2, 1, 1), (1, 1, 0)))
    x = torch.randn(3, 2, 5, 6, 7)
    found = alternatives(module, x)
    run(found, module, (x,))
    assert {"by_offsets", "packed", "by_sizes"} <= kinds(found)


def test_masks_of_any_layout_are_packed():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(7, 7)

        def forward(self, x):
            x = self.layer(x).transpose(0, 1)
            return torch.where(x > 0, x.sin(), x) * (x <= 1)

    x = torch.randn(13, 7)
    found = alternatives(Masked(), x)
    run(found, Masked(), (x,))
    unpacked = [op for op in found.graph.ops if op.name.endswith("__unpacked")]
    assert len(unpacked) == 2
    for op in unpacked:
        assert found.graph.value_by_name[op.inputs[0]].size_bytes == -(-13 * 7 // 8)


def test_a_relu_may_read_its_input_where_the_backward_does_anyway():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            x = self.layer(x)
            return torch.relu(x) * 2 + x.sin()

    x = torch.cat([torch.randn(9, 8), torch.zeros(1, 8)])
    found = alternatives(Twice(), x)
    run(found, Twice(), (x,))
    assert kinds(found) == {"by_other"}


def test_what_the_user_holds_or_runs_once_only_is_not_unpacked():
    class Shown(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            x = self.layer(x)
            mask = x > 0
            return torch.where(mask, x.sin(), x), mask

    assert not alternatives(Shown(), torch.randn(4, 8)).graph.has_alternatives


def test_copies_in_16_bits_are_of_the_backward_alone():
    module, x = Activated(nn.ReLU(), nn.MaxPool2d(2)), torch.randn(4, 3, 8, 8)
    found = alternatives(module, x, numerics=Numerics.LOSSY)
    near = lambda a, b: torch.allclose(a.float(), b.float(), rtol=1e-2) and same(a, a)  # noqa: E731
    run(found, module, (x,), lambda made, there: same(made, there) or near(made, there))
    lossy = [op for op in found.graph.ops if op.numerics is Numerics.LOSSY and op.alternative_of]
    assert lossy
    for op in lossy:
        assert (op.stage, op.order_after) == ("backward", ("loss",))
    exact = found.graph.with_numerics(Numerics.BITWISE)
    assert {op.name for op in exact.ops} == {op.name for op in alternatives(module, x).graph.ops}


def test_nothing_has_alternatives_unless_they_are_asked_for():
    module, x = Activated(nn.ReLU(), nn.MaxPool2d(2)), torch.randn(4, 3, 8, 8)
    plain = capture(module, (x,), costs="estimate")
    found = plain.with_alternatives()
    assert not plain.graph.has_alternatives
    assert plain.numerics is None
    assert found.graph.without_alternatives() == plain.graph
    with pytest.raises(CaptureError, match="has alternatives with numerics='bitwise'"):
        found.with_alternatives()


def test_variants_and_other_costs_keep_the_alternatives():
    module, x = Activated(nn.ReLU(), nn.MaxPool2d(2)), torch.randn(4, 3, 8, 8)
    found = alternatives(module, x)
    measured = found.costed("measure")
    for other in (found.variant(frozenset()), measured):
        assert other.program.order == found.program.order
        assert other.numerics is Numerics.BITWISE
    names = [op.name for op in measured.graph.ops if not op.owed]
    for name in names:
        op = measured.graph.ops[measured.graph.op_index[name]]
        assert op.time > 0
        known = found.program.calls[name].workspace_bytes
        assert op.workspace_bytes <= known or known == 0, name


def test_a_schedule_without_alternatives_costs_what_it_did():
    module, x = Activated(nn.ReLU(), nn.MaxPool2d(2)), torch.randn(4, 3, 8, 8)
    found = alternatives(module, x)
    steps = tuple(Compute(op.name) for op in found.graph.ops if op.owed)
    plain = simulate(found.graph.without_alternatives(), Schedule(steps))
    assert simulate(found.graph, Schedule(steps)) == plain


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1001])
def test_a_mask_of_any_size_is_packed_and_unpacked(count):
    mask = torch.rand(count) > 0.5
    packed = packing.pack_mask(mask, [1])
    assert len(packed) == packing.packed_bytes(count) == -(-count // 8)
    assert torch.equal(packing.unpack_mask(packed, mask.shape, mask.stride()), mask)


def test_a_tensor_that_came_in_another_layout_than_planned_is_packed_in_that():
    mask = torch.rand(5, 7) > 0.5
    packed = packing.pack_mask(mask, (1, 5))
    assert torch.equal(packing.unpack_mask(packed, mask.shape, (1, 5)), mask)


def test_signs_keep_what_the_operators_keep_for_every_kind_of_number():
    read, grad = (t.reshape(-1) for t in torch.meshgrid(STRANGE, STRANGE, indexing="ij"))
    layout = (read.shape, read.stride())
    got = packing.backward_of_kept(grad, packing.pack_above(read, [1], 0), *layout)
    assert same(got, aten.threshold_backward(grad, read, 0))
    read = read.nan_to_num(1.0)  # where that operator itself differs from place to place
    got = packing.backward_of_kept(grad, packing.pack_within(read, [1], 0.0, 6.0), *layout)
    assert same(got, aten.hardtanh_backward(grad, read, 0.0, 6.0))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil_mode"),
    [
        *itertools.product([[2, 3]], [[1, 2], [3, 1]], [[1, 0]], [[1, 1], [2, 3]], [False, True]),
        ([5, 5], [1, 1], [2, 2], [1, 1], False),
        ([17, 17], [1, 1], [0, 0], [1, 1], False),
    ],
)
def test_the_backward_of_a_pooling_by_offsets(kernel, stride, padding, dilation, ceil_mode):
    for shape in ((11, 2, 17, 19), (3, 18, 17)):
        x = torch.randn(shape).round()  # with ties
        x[..., 0, 0] = float("nan")
        window = [kernel, stride, padding, dilation]
        y, indices = aten.max_pool2d_with_indices(x, *window, ceil_mode)
        grad = torch.randn_like(y)
        dtype = packing.offset_type(kernel[0] * kernel[1])
        with AllocationRecorder(x.device) as recorder:
            packed = packing.pack_offsets(indices, shape[-2:], window, dtype)
        allowed = packed.nbytes + packing.offsets_workspace(indices.shape)
        assert recorder.requested_bytes <= allowed
        into = aten.max_pool2d_with_indices_backward.grad_input
        layout = (indices.shape, shape, x.stride())
        got = packing.backward_of_pool(into, grad, packed, *layout, window, ceil_mode)
        plain = aten.max_pool2d_with_indices_backward(grad, x, *window, ceil_mode, indices)
        assert same(got, plain)
    assert packing.offset_type(255) is torch.uint8
    assert packing.offset_type(256) is torch.int16
    assert packing.offset_type(1 << 15) is None
