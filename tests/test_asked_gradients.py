"""Who asks for the gradient of an output that the model also reads gets eager's, or an error."""

import copy

import pytest
import torch
from torch import nn

import remat
from remat_exec import BackwardError


class Reading(nn.Module):
    """Returns a hidden layer, and what it computes from that."""

    def __init__(self, *, breaks=False):
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 8)
        self.breaks = breaks

    def forward(self, x):
        hidden = self.hidden(x)
        after = hidden + 1  # eager does not keep its input
        if self.breaks:
            torch._dynamo.graph_break()
        return hidden, self.head(torch.tanh(after))


def asked(model, x):
    """Give what a hook gets that reads the gradient of the first output."""
    hidden, out = model(x)
    seen = []
    hidden.register_hook(lambda grad: seen.append(grad + 0))
    (hidden.square().sum() + out.sum()).backward()
    return seen[0]


def rematerialized(model, x):
    return remat.rematerialize(model, (x,), budget="1GiB", costs="estimate")


def compiled(model, x):
    return torch.compile(model, backend="remat", options={"budget": "1GiB", "costs": "estimate"})


def copied(model, x):
    return copy.deepcopy(rematerialized(model, x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's
@pytest.mark.parametrize("make", [rematerialized, compiled, copied])
@pytest.mark.parametrize("breaks", [False, True])
def test_a_part_of_a_gradient_is_never_taken_for_the_whole(make, breaks):
    model, x = Reading(breaks=breaks), torch.randn(4, 6)
    planned = make(model, x)
    for _ in range(5):
        with pytest.raises(BackwardError, match="output 0 of a region"):
            asked(planned, x)
