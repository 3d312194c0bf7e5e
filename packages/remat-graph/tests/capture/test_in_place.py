"""What may run over what it reads gives the same bits, and takes nothing beside."""

import pytest
import torch
from torch import nn

from remat_graph.torch import capture, packing
from remat_graph.torch.in_place import IN_PLACE
from remat_graph.torch.memory import AllocationRecorder

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
BACKWARDS = [op for op in IN_PLACE if "backward" in getattr(op, "__name__", "")]


def same(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def images(layout):
    x = torch.randn(3, 5, 7, 11).mul_(4)
    x.view(-1)[: len(STRANGE)] = torch.tensor(STRANGE)
    return x.to(memory_format=layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("operator", [*ARGUMENTS], ids=str)
def test_a_pointwise_backward_over_its_gradient_gives_the_same_bits(operator, layout):
    read, grad = images(layout), images(layout).mul_(0.3)
    arguments = ARGUMENTS[operator](read)
    expected = operator(grad, *arguments)
    with AllocationRecorder(grad.device) as recorder:
        IN_PLACE[operator](grad, *arguments)
    assert recorder.requested_bytes == 0
    assert same(grad, expected)


@pytest.mark.parametrize("planned", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_packed_backward_over_its_gradient_gives_the_same_bits(planned):
    read, grad = images(planned), images(torch.contiguous_format)
    packed = packing.pack_above(read, read.stride(), 0)
    arguments = (packed, read.shape, read.stride())
    expected = packing.backward_of_kept(grad, *arguments)
    for given in (grad.clone(), grad.to(memory_format=planned)):
        IN_PLACE[packing.backward_of_kept](given, *arguments)
        assert torch.equal(given, expected)
    with AllocationRecorder(grad.device) as recorder:
        IN_PLACE[packing.backward_of_kept](expected, *arguments)
    assert recorder.requested_bytes <= packing.mask_workspace(packed.nbytes)


def test_every_backward_that_may_overwrite_is_tried_here():
    assert {*BACKWARDS} == {*ARGUMENTS, packing.backward_of_kept}


def test_a_gradient_is_written_over_unless_it_came_from_outside():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Hardtanh())
    graph = capture(model, (torch.randn(4, 8),), costs="estimate").graph
    found = {op.name: bool(op.overwrites) for op in graph.ops if "backward" in op.name}
    assert found == {"hardtanh_backward": False, "threshold_backward": True}
