"""Outputs that nobody reads are not made, and what is read is right and within the budget."""

import copy
import logging

import pytest
import torch
from integration_cases.scores import LOW, TOKENS, check, messages, plain_step, steps_within, trained
from torch import nn
from torch.nn import functional

import remat
from remat_exec import Executable, OutputGone, measure_peak
from remat_exec.deferred import DeferredTensor


@pytest.fixture(scope="module")
def plain():
    return plain_step()


def test_what_is_not_named_is_not_made_and_is_right_when_read(plain, tmp_path):
    model, ids, logits, gradients, peak_bytes = plain
    budget = int(LOW * peak_bytes)
    made = remat.rematerialize(
        copy.deepcopy(model), ids, budget=budget, numerics="rounding", outputs=["loss", "hidden"]
    )
    output = steps_within(made, ids, budget, 2)  # while the output is held
    check(made, gradients)
    assert isinstance(output.logits, DeferredTensor)
    assert not isinstance(output.hidden[0], DeferredTensor)
    assert output.logits.shape == logits.shape
    assert torch.equal(output.logits, logits)
    assert "not made in a step" in str(made.plan)
    later = steps_within(made, ids, budget, 1)
    torch.optim.SGD(made.parameters(), 0.1).step()
    assert torch.equal(output.logits, logits)
    with pytest.raises(OutputGone):
        later.logits.sum()

    made.plan.save(tmp_path / "plan.json")
    again = remat.rematerialize(
        copy.deepcopy(model), ids, plan=tmp_path / "plan.json", numerics="rounding"
    )
    assert remat.Plan.load(tmp_path / "plan.json") == again.plan or again.plan.kinds
    assert again.plan.kinds[0].deferred == ((1, logits.nbytes),)
    output = steps_within(again, ids, budget, 1)
    check(again, gradients)
    assert torch.equal(output.logits, logits)


def test_without_names_it_is_found_out_in_the_first_step(plain):
    model, ids, logits, gradients, peak_bytes = plain
    budget = int(0.9 * peak_bytes)
    made = remat.rematerialize(copy.deepcopy(model), ids, budget=budget, numerics="rounding")
    assert not made.plan.kinds[0].deferred
    output = steps_within(made, ids, budget, 1)
    assert isinstance(output.logits, DeferredTensor)
    output = steps_within(made, ids, budget, 1)
    assert made.plan.kinds[0].deferred == ((1, logits.nbytes),)
    check(made, gradients)
    assert torch.equal(output.logits, logits)


def test_where_no_plan_fits_otherwise_they_are_not_made_from_the_start(plain, caplog):
    model, ids, logits, gradients, peak_bytes = plain
    budget = int(LOW * peak_bytes)
    made = remat.rematerialize(
        copy.deepcopy(model), ids, budget=budget, numerics="rounding", limit_seconds=0.1
    )
    for _ in range(2):  # and once more though it was read
        output = steps_within(made, ids, budget, 1)
        check(made, gradients)
        with caplog.at_level(logging.WARNING, "remat"):
            assert torch.equal(output.logits, logits)
    assert len(messages(caplog)) == 1
    assert made.plan.kinds[0].deferred


@pytest.mark.sweep
def test_bit_by_bit_they_are_not_made_either_where_no_plan_fits_otherwise(plain):
    model, ids, logits, gradients, peak_bytes = plain
    released = peak_bytes - logits.nbytes  # a plain step that holds the loss alone takes no more
    made = remat.rematerialize(copy.deepcopy(model), ids, budget=released, limit_seconds=0.1)
    for _ in range(2):  # and once more though it was read
        output = steps_within(made, ids, released, 1)
        for parameter, gradient in zip(made.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)
        assert isinstance(output.logits, DeferredTensor)
        assert torch.equal(output.logits, logits)
    made = remat.rematerialize(copy.deepcopy(model), ids, budget=1.0, limit_seconds=0.1)
    output = trained(made, ids)
    assert made.plan.budget_bytes < peak_bytes
    assert torch.equal(output.logits, logits)


@pytest.mark.sweep
def test_a_dry_plan_does_not_make_them_where_none_fits_otherwise_and_can_be_followed(
    plain, tmp_path
):
    model, ids, logits, gradients, peak_bytes = plain
    released = peak_bytes - logits.nbytes
    options = {"budget": released, "limit_seconds": 0.1}
    for costs in ("measure", "estimate"):
        plan = remat.plan(model, ids, costs=costs, **options)
        assert plan.predicted_peak_bytes <= released
        assert plan.kinds[0].deferred
    plan.save(tmp_path / "dry.plan")
    made = remat.rematerialize(copy.deepcopy(model), plan=tmp_path / "dry.plan", **options)
    output = steps_within(made, ids, released, 1)
    for parameter, gradient in zip(made.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert torch.equal(output.logits, logits)


@pytest.mark.sweep
def test_other_batches_and_eval(plain):
    model, ids, _, _, peak_bytes = plain
    budget = int(LOW * peak_bytes)
    made = remat.rematerialize(
        copy.deepcopy(model), ids, budget=budget, numerics="rounding", outputs=0
    )
    trained(made, ids)
    shorter = ids[:, : TOKENS // 2]
    eager = copy.deepcopy(model)
    expected = trained(eager, shorter)
    with measure_peak() as peak:
        output = trained(made, shorter)
    assert peak.peak_bytes <= budget
    check(made, [parameter.grad for parameter in eager.parameters()])
    assert torch.equal(output.logits, expected.logits)
    with torch.no_grad():
        assert type(made(ids).logits) is torch.Tensor


@pytest.mark.parametrize(
    "outputs",
    [
        "losses",
        pytest.param(3, marks=pytest.mark.sweep),
        pytest.param(["loss", -4], marks=pytest.mark.sweep),
    ],
)
def test_a_name_that_is_not_there_is_refused(plain, outputs):
    model, ids, *_ = plain
    with pytest.raises(remat.RematError, match="'loss', 'logits', 'hidden'"):
        remat.rematerialize(copy.deepcopy(model), ids, budget="1GiB", outputs=outputs)
    with pytest.raises(remat.RematError, match="'loss', 'logits', 'hidden'"):
        remat.plan(copy.deepcopy(model), ids, budget="1GiB", outputs=outputs, costs="estimate")


def test_an_executor_that_makes_all_is_given_no_names(plain, monkeypatch):
    model, ids, *_ = plain
    monkeypatch.setattr(Executable, "abilities", frozenset())
    with pytest.raises(remat.RematError, match="makes every output"):
        remat.rematerialize(copy.deepcopy(model), ids, budget="1GiB", outputs="loss")


@pytest.mark.parametrize("outputs", [True, 1.5, [None]])
def test_what_is_no_name_is_refused(plain, outputs):
    model, ids, *_ = plain
    with pytest.raises(remat.RematError, match="name what is read"):
        remat.rematerialize(copy.deepcopy(model), ids, budget="1GiB", outputs=outputs)


def test_a_refusal_says_what_would_help(plain):
    model, ids, *_, peak_bytes = plain
    with pytest.raises(remat.BudgetTooSmall) as refused:
        remat.plan(copy.deepcopy(model), ids, budget=int(LOW * peak_bytes), costs="estimate")
    (slices,) = refused.value.__notes__  # no outputs: it was tried without these
    assert "numerics='rounding'" in slices

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = copy.deepcopy(model)

        def forward(self, ids):
            return self.model(ids).logits

    with pytest.raises(remat.BudgetTooSmall) as refused:
        remat.plan(Scores(), ids, budget=int(0.3 * peak_bytes), costs="estimate")
    assert any("A loss outside the model" in note for note in refused.value.__notes__)


def test_a_loss_brought_in_is_planned_and_made_in_slices(plain):
    """The module of docs/budget.md."""
    model, ids, _, gradients, peak_bytes = plain

    class WithLoss(nn.Module):
        def __init__(self, model, criterion):
            super().__init__()
            self.model, self.criterion = model, criterion

        def forward(self, ids, labels):
            return self.criterion(self.model(ids).logits, labels)

    def criterion(logits, labels):
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    whole = WithLoss(copy.deepcopy(model), criterion)
    budget = int(LOW * peak_bytes)
    made = remat.rematerialize(whole, (ids, ids), budget=budget, numerics="rounding")
    torch.manual_seed(7)
    with measure_peak() as peak:
        made(ids, ids).backward()
    assert peak.peak_bytes <= budget
    check(made, gradients)
