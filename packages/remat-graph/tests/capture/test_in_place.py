"""What may run over what it reads gives the same bits, and takes nothing beside."""

import pytest
import torch
from torch import nn

from remat_graph.torch import capture
from remat_graph.torch.cost.memory import AllocationRecorder
from remat_graph.torch.kernels import packing
from remat_graph.torch.operators import OPERATORS

aten = torch.ops.aten
STRANGE = [0.0, -0.0, 1e-45, -1e-45, 0.5, -0.5, 6.0, 3.0, float("inf"), -float("inf")]
ARGUMENTS = {  # behind the gradient
    aten.elu_backward.default: lambda x: (1.5, 1.0, 1.0, False, x),
    aten.gelu_backward.default: lambda x: (x,),
    aten.hardshrink_backward.default: lambda x: (x, 0.5),
    aten.hardsigmoid_backward.default: lambda x: (x,),
    aten.hardtanh_backward.default: lambda x: (x, 0.0, 6.0),
    aten.leaky_relu_backward.default: lambda x: (x, 0.1, False),
    aten.sigmoid_backward.default: lambda x: (x,),
    aten.silu_backward.default: lambda x: (x,),
    aten.softplus_backward.default: lambda x: (x, 1.0, 20.0),
    aten.softshrink_backward.default: lambda x: (x, 0.5),
    aten.tanh_backward.default: lambda x: (x,),
    aten.threshold_backward.default: lambda x: (x, 0),
}
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OTHERS = {  # what else is read: numbers, and tensors, of which some have no dimensions
    aten.relu.default: [()],
    aten.hardtanh.default: [(), (-0.37, 1.3)],
    aten.leaky_relu.default: [(), (0.37,)],
    aten.sigmoid.default: [()],
    aten.tanh.default: [()],
    aten.neg.default: [()],
    **dict.fromkeys((aten.mul.Scalar, aten.div.Scalar), ((0.37,), (3,))),
    **dict.fromkeys(
        (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        ((0.37,), (torch.tensor(0.37),), (torch.tensor(0.37, dtype=torch.float64),)),
    ),
}


def same(one, other):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return one.dtype == other.dtype and torch.equal(one.view(bits), other.view(bits))


def images(layout):
    x = torch.randn(3, 5, 7, 11).mul_(4)
    x.view(-1)[: len(STRANGE)] = torch.tensor(STRANGE)
    return x.to(memory_format=layout)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("operator", [*OTHERS], ids=str)
def test_a_function_over_its_input_gives_the_same_bits(operator, dtype):
    x = torch.randn(4099).to(dtype)
    others = OTHERS[operator]
    if operator._overloadname == "Tensor":
        others = [*others, (torch.randn(4099).to(dtype),), (torch.randn(1).to(dtype),)]
    for rest in others:
        expected = operator(x, *rest)
        found = OPERATORS[operator].in_place(x.clone(), *rest)
        assert same(found, expected), rest


@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("operator", [*ARGUMENTS], ids=str)
def test_a_pointwise_backward_over_its_gradient_gives_the_same_bits(operator, layout, dtype):
    read, grad = images(layout).to(dtype), images(layout).mul_(0.3).to(dtype)
    arguments = ARGUMENTS[operator](read)
    expected = operator(grad, *arguments)
    with AllocationRecorder(grad.device) as recorder:
        OPERATORS[operator].in_place(grad, *arguments)
    assert recorder.requested_bytes == 0
    assert same(grad, expected)


@pytest.mark.parametrize("planned", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_packed_backward_over_its_gradient_gives_the_same_bits(planned):
    read, grad = images(planned), images(torch.contiguous_format)
    packed = packing.pack_above(read, read.stride(), 0)
    arguments = (packed, read.shape, read.stride())
    expected = packing.backward_of_kept(grad, *arguments)
    for given in (grad.clone(), grad.to(memory_format=planned)):
        OPERATORS[packing.backward_of_kept].in_place(given, *arguments)
        assert torch.equal(given, expected)
    with AllocationRecorder(grad.device) as recorder:
        OPERATORS[packing.backward_of_kept].in_place(expected, *arguments)
    assert recorder.requested_bytes <= packing.mask_workspace(packed.nbytes)


def test_all_that_may_overwrite_is_tried_here():
    assert {target for target, operator in OPERATORS.items() if operator.in_place} == {
        *OTHERS,
        *ARGUMENTS,
        packing.backward_of_kept,
    }


def test_a_gradient_is_written_over_unless_it_came_from_outside():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Hardtanh())
    graph = capture(model, (torch.randn(4, 8),), costs="estimate").graph
    found = {op.name: bool(op.overwrites) for op in graph.ops if "backward" in op.name}
    assert found == {"hardtanh_backward": False, "threshold_backward": True}
