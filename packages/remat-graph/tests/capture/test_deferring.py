"""Outputs that a step does not make: which can be, what then goes, and what they are made by."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from remat_graph import Numerics
from remat_graph.torch import CaptureError, capture, ops_making

WORDS, WIDTH = 500, 8


class Model(nn.Module):
    """A head with a loss, whose other outputs are `more(hidden, scores)`."""

    def __init__(self, more, norm=None):
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.norm = nn.Identity() if norm is None else norm
        self.more = more

    def forward(self, x, y):
        hidden = functional.dropout(self.norm(self.first(x)), 0.5)
        scores = self.out(hidden)
        return {"loss": functional.cross_entropy(scores, y), **self.more(hidden, scores, x)}


def captured(more, norm=None):
    torch.manual_seed(0)
    args = torch.randn(30, WIDTH), torch.randint(WORDS, (30,))
    return capture(Model(more, norm), args, costs="estimate")


class Deep(nn.Module):
    """A norm before the rest, after so many others that scores are little of all."""

    def forward(self, x):
        for _ in range(120):
            x = x.repeat(1, WORDS // WIDTH)[:, :WIDTH] * 1.01
        return x


@pytest.mark.sweep
def test_what_is_large_beside_one_layer_can_wait_in_a_deep_model():
    step = captured(lambda hidden, scores, x: {"scores": scores}, Deep())
    total = sum(value.size_bytes for value in step.graph.values)
    assert 100 * step.deferred_bytes(frozenset({1})) < total
    assert step.deferrable == {1}


def test_an_output_that_no_gradient_comes_to_can_wait():
    step = captured(lambda hidden, scores, x: {"scores": scores})
    assert step.deferrable == {1}
    deferred = step.with_deferred_outputs(step.deferrable)
    assert step.graph.results - deferred.graph.results == {step.program.storage["addmm_1"]}
    assert len(deferred.graph.ops) == len(step.graph.ops)  # the loss needs the scores
    assert deferred.deferred_bytes(frozenset({1})) == 30 * WORDS * 4
    assert deferred.with_deferred_outputs(frozenset()).graph == step.graph
    assert deferred.variant(deferred.missing).program.deferred == {1}
    assert deferred.variant(frozenset()).program.deferred == frozenset()


def test_what_it_alone_needs_goes_and_draws_stay():
    def more(hidden, scores, x):
        return {"wide": functional.dropout(scores, 0.5).exp()}

    step = captured(more)
    deferred = step.with_deferred_outputs(frozenset({1}))
    gone = {op.name for op in step.graph.ops} - {op.name for op in deferred.graph.ops}
    assert "exp" in gone
    drawing = [op for op, call in step.program.calls.items() if call.random is not None]
    assert len(drawing) == 2
    assert not gone.intersection(drawing)
    assert "exp" in ops_making(step.program, 1)
    assert "exp" in ops_making(deferred.whole_program, 1)


@pytest.mark.parametrize(
    "more",
    [
        lambda hidden, scores, x: {"small": scores.sum()},
        lambda hidden, scores, x: {"input": x},
        lambda hidden, scores, x: {"decides": scores.topk(400)[1]},
        lambda hidden, scores, x: {"two": scores.detach(), "views": scores.detach()[1:]},
    ],
)
def test_what_is_small_or_given_or_decided_or_shared_is_made(more):
    step = captured(more)
    assert len(step.deferrable) <= 1  # views of one value are one output of the graph
    for position in step.deferrable:
        assert step.program.facts[step.program.handed[position]].shape == (30, WORDS)
    if "two" not in more(None, torch.zeros(30, WORDS), None):
        assert not step.deferrable
        with pytest.raises(CaptureError, match="cannot be made when read"):
            step.with_deferred_outputs(frozenset({0, 1}))


def test_batch_norm_is_run_again_without_its_statistics():
    step = captured(lambda hidden, scores, x: {"scores": scores}, nn.BatchNorm1d(WIDTH))
    assert step.program.writes
    assert step.deferrable == {1}


def test_what_reads_a_buffer_that_the_forward_changes_is_made():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x):
            shifted = x - self.mean
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return shifted

    assert not captured(lambda hidden, scores, x: {"scores": scores}, Mean()).deferrable


def test_the_head_of_an_output_that_waits_is_cut():
    step = captured(lambda hidden, scores, x: {"scores": scores})
    able = step.with_alternatives(Numerics.ROUNDING, laid_out=())
    before = able.in_slices([(kind, 5) for kind in range(len(able.cuts))])
    later = before.with_deferred_outputs(frozenset({1}))
    able = able.with_deferred_outputs(frozenset({1}))
    sliced = able.in_slices([(kind, 5) for kind in range(len(able.cuts))])
    value = step.program.storage["addmm_1"]
    assert value in before.graph.value_by_name
    assert value not in sliced.graph.value_by_name
    assert later.sliced == before.sliced
