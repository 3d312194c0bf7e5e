"""Views made in fewer calls are the same views, of real tensors."""

import copy

import pytest
import torch
from exec_cases.models import CASES, Scheduled
from exec_cases.training import assert_bitwise_equal, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from remat_exec import Executable
from remat_exec.views import shortened
from remat_graph.torch import capture
from remat_solvers import store_all


def made(program, name, tensors, shorter):
    """Make a view of real tensors; `shorter` stands in for the calls that were traced."""
    call = shorter.get(name, program.views.get(name))
    if call is None:
        if name not in tensors:
            facts = program.facts[name]
            buffer = torch.zeros(facts.storage_bytes, dtype=torch.uint8)
            tensors[name] = buffer.view(facts.dtype).as_strided(
                facts.shape, facts.stride, facts.offset
            )
        return tensors[name]
    if isinstance(call, str):
        return made(program, call, tensors, shorter)
    (read,) = call.reads
    views = call.target(made(program, read, tensors, shorter), *call.args[1:], **call.kwargs)
    return views[call.results.index(name)] if call.sequence else views


def calls_of_views(program, shorter):
    calls = [shorter.get(name, call) for name, call in program.views.items()]
    return sum(not isinstance(call, str) for call in calls)


def steps_of(tensor):
    """The strides that say where elements are; of a dimension of one, any does."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def assert_same_views(program):
    shorter, tensors = shortened(program), {}
    for name in shorter:
        one, two = (made(program, name, tensors, known) for known in ({}, shorter))
        assert one.data_ptr() == two.data_ptr()
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        assert steps_of(one) == steps_of(two)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shorter_views_are_the_same_views(case):
    assert_same_views(case.captured.program)


class Chain(nn.Module):
    """A linear layer whose output is viewed in several ways, one after another."""

    def __init__(self, ways):
        super().__init__()
        self.layer, self.ways = nn.Linear(12, 12), ways

    def forward(self, x):
        x = self.layer(x)
        for way, argument in self.ways:
            if way == "view":
                x = x.reshape(argument)
            elif way == "transpose":
                x = x.transpose(argument % x.dim(), -1)
            elif way == "slice":
                x = x.narrow(argument % x.dim(), 0, x.shape[argument % x.dim()])
            else:
                x = x.unsqueeze(argument % (x.dim() + 1)).squeeze(argument % (x.dim() + 1))
        return torch.tanh(x)


SHAPES = [(6, 12), (12, 6), (72,), (2, 3, 12), (3, 2, 6, 2), (1, 72), (72, 1), (6, 1, 12)]
WAYS = st.one_of(
    st.tuples(st.just("view"), st.sampled_from(SHAPES)),
    st.tuples(st.sampled_from(["transpose", "slice", "unsqueeze"]), st.integers(0, 3)),
)


@settings(max_examples=8)
@given(ways=st.lists(WAYS, max_size=6))
def test_any_chain_of_views_trains_to_the_same_bits(ways):
    torch.manual_seed(0)
    model, x = Chain(ways), torch.randn(6, 12)
    captured = capture(model, (x,), costs="estimate")
    assert_same_views(captured.program)
    planned = Scheduled(copy.deepcopy(model), captured)
    records = [
        train(each, lambda module, _: module(x), lambda y: (y * y).sum(), steps=1)
        for each in (planned, model)
    ]
    assert_bitwise_equal(*records)


def test_a_linear_layer_transposes_its_weight_once_each_way():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    captured = capture(model, (torch.randn(2, 3, 8),), costs="estimate")
    program = captured.program
    source = Executable(captured, store_all(captured.graph)).source
    assert calls_of_views(program, shortened(program)) < calls_of_views(program, {})
    # forward: of both weights; backward: of what comes from above, for the weight's gradient
    assert source.count(".t()") == 4
