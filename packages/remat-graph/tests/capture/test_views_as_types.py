"""Outputs that read memory as another type are handed to autograd, and made, as what they are."""

import pytest
import torch
from torch import nn

from remat_graph.torch import CaptureError, Program, capture


class Rounded(torch.autograd.Function):
    """Drops the low half of each number, and hands gradients through."""

    @staticmethod
    def forward(ctx, x):
        return x.view(torch.int32).bitwise_and(-65536).view(torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Viewing(nn.Module):
    """Returns a view of a buffer that it changes."""

    def __init__(self, view):
        super().__init__()
        self.layer, self.view = nn.Linear(2, 2), view
        self.register_buffer("numbers", torch.tensor([1 + 2j, 3 + 4j]))

    def forward(self, x):
        self.numbers.mul_(0.5)
        return self.layer(x), self.view(self.numbers)


VIEWS = {"_conj": torch.conj, "_neg_view": torch._neg_view, "view_as_real": torch.view_as_real}


class Rounding(nn.Linear):
    def forward(self, x):
        return Rounded.apply(super().forward(x)).view(-1)


def test_autograd_is_handed_numbers_that_may_have_a_gradient():
    program = capture(Rounding(2, 2), (torch.ones(3, 2),), costs="estimate").program
    (handed,) = program.handed
    assert program.facts[handed].dtype == torch.float32
    assert program.views[handed].target == torch.ops.aten.view.dtype


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_that_strides_do_not_describe_is_made_of_what_is_written(view):
    program = capture(Viewing(VIEWS[view]), (torch.ones(3, 2),), costs="estimate").program
    output = program.outputs[1]
    assert (output.kind, output.layout) == ("input_view", None)
    chain = program.view_chain(output.variable, *program.written_into(output.base))
    assert [call.name for call in chain] == [f"aten.{view}.default"]


@pytest.mark.parametrize("view", VIEWS.values())
def test_it_is_refused_where_nobody_knows_how_it_is_made(view, monkeypatch):
    monkeypatch.setattr(Program, "view_chain", lambda *_: None)
    with pytest.raises(CaptureError, match=r"output 1, of .* is a view of .*; return a copy"):
        capture(Viewing(view), (torch.ones(3, 2),), costs="estimate")
    capture(Viewing(lambda z: view(z).clone()), (torch.ones(3, 2),), costs="estimate")
