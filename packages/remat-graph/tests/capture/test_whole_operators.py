"""What eager runs as one kernel is one operator in a trace, where torch would take it apart."""

import threading

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from remat_graph.torch import capture
from remat_graph.torch.tracing.whole_operators import operators_kept_whole

aten = torch.ops.aten


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.linspace(-1, 1, 6))
        self.register_buffer("targets", torch.tensor([[3, 0, -1, 1, 1, 1], [2, 4, 1, -1, 0, 0]]))

    def forward(self, x):
        return self.function(x * self.weight, self.targets)


def resized(mode, **options):
    return lambda x, _: functional.interpolate(x, mode=mode, **options)


LINE, IMAGE, VOLUME = (2, 3, 6), (2, 3, 5, 6), (1, 2, 3, 4, 6)
CASES = {
    "linear": (LINE, resized("linear", scale_factor=2)),
    "bilinear": (IMAGE, resized("bilinear", scale_factor=2)),
    "bilinear, corners": (IMAGE, resized("bilinear", size=(7, 11), align_corners=True)),
    "bilinear, smaller": (IMAGE, resized("bilinear", scale_factor=0.6)),
    "bicubic": (IMAGE, resized("bicubic", scale_factor=1.7)),
    "trilinear": (VOLUME, resized("trilinear", scale_factor=2)),
    "nearest, line": (LINE, resized("nearest", scale_factor=2)),
    "nearest, image": (IMAGE, resized("nearest", scale_factor=(2, 1.5))),
    "nearest, volume": (VOLUME, resized("nearest", scale_factor=2)),
    "nearest-exact, line": (LINE, resized("nearest-exact", scale_factor=2)),
    "nearest-exact, image": (IMAGE, resized("nearest-exact", size=(9, 9))),
    "nearest-exact, volume": (VOLUME, resized("nearest-exact", scale_factor=2)),
    "hardshrink": (IMAGE, lambda x, _: functional.hardshrink(x)),
    "softshrink": (IMAGE, lambda x, _: functional.softshrink(x)),
    "multi margin": ((2, 6), lambda x, targets: functional.multi_margin_loss(x, targets[:, 0])),
    "multilabel margin": ((2, 6), functional.multilabel_margin_loss),
}


@pytest.mark.parametrize("name", CASES)
def test_one_operator_in_each_half(name):
    shape, function = CASES[name]
    graph = capture(Function(function), (torch.randn(shape),), costs="estimate").graph
    product, operator, loss, backward, *rest = [op.name for op in graph.ops]
    assert (product, loss) == ("mul", "loss")
    assert backward == f"{operator}_backward".replace("_forward", "")
    assert not any("index" in name or "where" in name for name in rest)


def is_one_operator():
    with FakeTensorMode() as mode, enable_python_dispatcher():
        image = mode.from_tensor(torch.ones(IMAGE)).requires_grad_()
        result = functional.interpolate(image, scale_factor=2, mode="bilinear")
    return "Upsample" in type(result.grad_fn).__name__


def test_another_thread_and_what_comes_after_see_what_torch_says():
    operator = aten.upsample_bilinear2d.vec
    before, seen = dict(operator.py_kernels), []
    with operators_kept_whole():
        other = threading.Thread(target=lambda: seen.append(is_one_operator()))
        other.start()
        other.join()
        seen.append(is_one_operator())
    assert seen == [False, True]
    assert operator.py_kernels == before
    assert not is_one_operator()
