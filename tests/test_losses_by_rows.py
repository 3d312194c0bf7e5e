"""Cross entropies by rows in whole models: peaks, gradients, regions, plan files."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import remat
from remat_exec import DeferredTensor, Executable, measure_peak
from remat_graph import Numerics, simulate
from remat_graph.torch import capture
from remat_solvers import store_all

WORDS = 8192


class Reader(nn.Module):
    """Words, two blocks, and the loss of a head in 32 bits or more; it may break before that."""

    def __init__(self, *, breaks=False, logits=False):
        super().__init__()
        self.breaks, self.logits = breaks, logits
        self.embed = nn.Embedding(WORDS, 32)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        )
        self.head = nn.Linear(32, WORDS, bias=False)

    def forward(self, words, target):
        x = self.blocks(self.embed(words))
        if self.breaks:
            torch._dynamo.graph_break()
        scores = self.head(x)
        long = scores.to(torch.promote_types(scores.dtype, torch.float32))
        loss = functional.cross_entropy(long.flatten(0, 1), target.flatten())
        return (loss, scores) if self.logits else loss


def built(dtype=torch.float32, **how):
    torch.manual_seed(0)
    model = Reader(**how).to(dtype)
    words = torch.randint(WORDS, (2, 64))
    return model, (words, words.roll(-1, 1))


def gradients(model, args):
    model.zero_grad(set_to_none=True)
    result = model(*args)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def assert_like(found, expected, tolerance):
    assert abs(found[0] - expected[0]) <= tolerance * abs(expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-12),
        pytest.param(torch.float32, 1e-6, marks=pytest.mark.sweep),
        (torch.bfloat16, 1e-2),
    ],
    ids=str,
)
def test_all_is_stored_in_a_third_of_the_scores(dtype, tolerance):
    model, args = built(dtype)
    expected = gradients(model, args)
    plain = capture(model, args, {}, costs="measure")
    able = plain.with_alternatives(Numerics.ROUNDING, laid_out=())
    scores = args[0].numel() * WORDS * max(4, dtype.itemsize)
    stored = [simulate(each.graph, store_all(each.graph)).peak_bytes for each in (plain, able)]
    assert stored[0] - stored[1] > scores
    executable = Executable(able, store_all(able.graph))
    with measure_peak() as peak:
        found = gradients_of(executable, model, args)
    assert_like(found, expected, tolerance)
    assert peak.peak_bytes <= stored[1] + 4096


def gradients_of(executable, model, args):
    model.zero_grad(set_to_none=True)
    loss = executable(model, list(args))[0]
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "how",
    [{}, {"logits": True}, {"breaks": True}],
    ids=str,
)
def test_a_model_trains_by_rows(how, tmp_path):
    """Steps are like plain ones within the budget; a plan file makes the same steps again."""
    model, args = built(**how)
    expected = gradients(copy.deepcopy(model), args)
    settings = {"budget": 0.75, "numerics": "rounding"}
    planned = remat.rematerialize(copy.deepcopy(model), args, **settings)
    for _ in range(3):  # steps of several regions are planned once their outputs are known
        assert_like(gradients(planned, args), expected, 1e-6)
    for _ in range(2):
        with measure_peak() as peak:
            found = gradients(planned, args)
        assert_like(found, expected, 1e-6)
        assert peak.peak_bytes <= planned.plan.budget_bytes
    ops = [op for kind in planned.plan.kinds for op in kind.front.graph.ops]
    assert any("__of_scores" in op.name or "slices" in op.name for op in ops)
    planned.plan.save(tmp_path / "plan.json")
    again = remat.rematerialize(copy.deepcopy(model), args, **settings, plan=tmp_path / "plan.json")
    assert_like(gradients(again, args), expected, 1e-6)


def test_regions_that_share_a_budget_take_it_whole():
    """Where nothing must be in slices, the loss is one op all the same."""
    model, args = built(breaks=True)
    planned = remat.rematerialize(model, args, budget="40MiB", numerics="rounding")
    for _ in range(4):
        gradients(planned, args)
    ops = [op for kind in planned.plan.kinds for op in kind.front.graph.ops]
    assert not any("slices" in op.name for op in ops)
    assert any("__of_scores" in op.name for op in ops)


@pytest.mark.sweep
def test_a_wrong_target_is_refused_as_by_torch():
    model, (words, target) = built()
    planned = remat.rematerialize(model, (words, target), budget=0.75, numerics="rounding")
    gradients(planned, (words, target))
    wrong = target.clone()
    wrong[0, 3] = WORDS
    with pytest.raises(IndexError, match="out of bounds"):
        planned(words, wrong)
    gradients(planned, (words, target))


@pytest.mark.parametrize(
    ("budget", "is_made"), [pytest.param("40MiB", True, marks=pytest.mark.sweep), ("6MiB", False)]
)
def test_scores_that_nobody_reads_are_made_where_there_is_room(budget, is_made):
    """To make them later, all that they are made of is summed up in each step."""
    model, args = built(logits=True)
    expected = gradients(copy.deepcopy(model), args)
    planned = remat.rematerialize(model, args, budget=budget, numerics="rounding", costs="estimate")
    for _ in range(4):
        with measure_peak() as peak:
            assert_like(gradients(planned, args), expected, 1e-6)
    assert peak.peak_bytes <= planned.plan.budget_bytes
    loss, scores = planned(*args)
    assert isinstance(scores, DeferredTensor) != is_made
    loss.backward()
    torch.testing.assert_close(scores + 0, model.head(model.blocks(model.embed(args[0]))))
