"""Outputs of several regions that nobody reads are not made, and are right when they are read."""

import copy
import warnings

import pytest
import torch
from integration_cases.scores_of_regions import (
    IDS,
    LOGITS,
    TOKENS,
    Language,
    deferred,
    gradients,
    plain_step,
    roomy,
    steps,
    trained,
)
from torch.nn import functional

import remat
from remat_exec import OutputGone, measure_peak
from remat_exec.deferred import DeferredTensor


@pytest.fixture(scope="module")
def plain():
    return plain_step()


def several_steps(model, read):
    for _ in range(7):
        trained(model, IDS, read)


WAYS = pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"regions": "head"}, marks=pytest.mark.sweep),
        pytest.param({"outputs": "loss", "numerics": None}, marks=pytest.mark.sweep),
        {"outputs": "loss", "regions": "head"},
    ],
    ids=["learned", "learned, regions=", "named", "named, regions="],
)


@WAYS
def test_what_nobody_reads_is_not_made_and_is_right_when_read(plain, options):
    expected, logits, _ = plain
    model = roomy(plain, **options)
    output, _ = steps(model, 1, expected)
    assert type(output["logits"]) is torch.Tensor
    output, _ = steps(model, 5, expected)
    assert isinstance(output["logits"], DeferredTensor)
    assert [size for _, size in deferred(model)] == [LOGITS]
    assert "not made in a step" in str(model.plan)
    assert output["logits"].shape == logits.shape
    assert torch.equal(output["logits"], logits)
    later = trained(model)
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert torch.equal(output["logits"], logits)
    if "outputs" in options:
        with pytest.raises(OutputGone):
            later["logits"].sum()


def test_a_budget_that_no_plan_with_it_reaches_is_kept(plain):
    expected, logits, peak_bytes = plain
    budget = int(0.4 * peak_bytes)
    options = {"budget": budget, "numerics": "rounding", "limit_seconds": 0.1}
    model = remat.rematerialize(Language(), **options)
    for at in range(7):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if at < 3 else "error")
            with measure_peak() as peak:
                output = trained(model)
        for given, one in zip(gradients(model), expected, strict=True):
            assert (given - one).abs().max() <= 1e-6 * one.abs().max()
        assert at < 3 or peak.peak_bytes <= budget
    assert torch.equal(output["logits"], logits)
    read = remat.rematerialize(Language(), **options)
    with pytest.warns(remat.BudgetWarning):
        several_steps(read, lambda output: output["logits"].argmax(-1))
    with pytest.warns(remat.BudgetWarning, match="was read before the backward"):
        trained(read, IDS, lambda output: output["logits"].argmax(-1))


@pytest.mark.sweep
def test_bit_by_bit_it_is_not_made_either_where_no_plan_with_it_fits(plain):
    expected, logits, peak_bytes = plain
    budget = peak_bytes - LOGITS
    model = remat.rematerialize(Language(), budget=budget, limit_seconds=0.1)
    over = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for at in range(8):
            with measure_peak() as peak:
                output = trained(model)
            assert all(map(torch.equal, gradients(model), expected))
            over += [at + 1] * (peak.peak_bytes > budget)
    assert over == [int(str(each.message).split()[1]) for each in told]
    assert max(over) <= 4
    assert [size for _, size in deferred(model)] == [LOGITS]
    assert torch.equal(output["logits"], logits)
    read = remat.rematerialize(Language(), budget=budget, limit_seconds=0.1)
    with pytest.warns(remat.BudgetWarning):
        several_steps(read, lambda output: output["logits"].argmax(-1))
    with pytest.warns(remat.BudgetWarning, match="was read before the backward"):
        trained(read, IDS, lambda output: output["logits"].argmax(-1))


class Shared(Language):
    """Regions read what one before them made without a gradient; the last one hands it out."""

    def forward(self, ids):
        x = self.words(ids)
        table = torch.arange(ids.numel() * 40.0).view(*ids.shape, 40).sin() * x.detach().mean()
        logits = x.detach().repeat(1, 1, 20)
        torch._dynamo.graph_break()
        x = x + self.down(functional.gelu(self.up(x))) * table.mean(-1, keepdim=True)
        torch._dynamo.graph_break()
        loss = self.head(x, ids)[0] * table.mean()
        return {"loss": loss, "logits": logits, "table": table}


def test_what_a_later_region_reads_is_made():
    eager = Shared()
    expected, logits = (trained(eager)["logits"], gradients(eager))[::-1]
    model = remat.rematerialize(Shared(), budget="1GiB", numerics="rounding", limit_seconds=0.1)
    output, _ = steps(model, 6, expected)
    assert type(output["table"]) is torch.Tensor
    assert isinstance(output["logits"], DeferredTensor)
    assert torch.equal(output["logits"], logits)


def test_a_second_loss_over_it_is_planned_for(plain):
    expected, _, _ = plain

    def both(model):
        torch.manual_seed(7)
        model.zero_grad(set_to_none=True)
        output = model(IDS)
        (output["loss"] + output["logits"].square().mean()).backward()

    eager = Language()
    both(eager)
    model = roomy(plain)
    for _ in range(5):
        both(model)
        assert all(map(torch.equal, gradients(model), gradients(eager)))
    assert not deferred(model)
    model = roomy(plain)
    steps(model, 5, expected)
    for _ in range(2):  # the second is planned for
        both(model)
        assert all(map(torch.equal, gradients(model), gradients(eager)))


@pytest.mark.sweep
def test_two_forwards_before_a_backward_evaluation_and_other_sizes(plain):
    expected, _, _ = plain
    eager, model = Language(), roomy(plain)
    steps(model, 4, expected)
    for at in range(5):
        for each in (eager, model):
            torch.manual_seed(7)
            each.zero_grad(set_to_none=True)
            outputs = [each(IDS), each(IDS.flip(0))]
            (outputs[0]["loss"] + outputs[1]["loss"]).backward()
            if each is eager:
                wanted = outputs[1]["logits"]
        assert all(map(torch.equal, gradients(model), gradients(eager)))
        if at == 4:
            assert torch.equal(outputs[1]["logits"], wanted)
        with torch.no_grad():
            assert type(model(IDS)["logits"]) is torch.Tensor
    model = roomy(plain)
    steps(model, 4, expected)
    shorter = IDS[:, : TOKENS // 2]
    expected = trained(eager, shorter)
    output, _ = steps(model, 3, gradients(eager), ids=shorter)
    assert torch.equal(output["logits"], expected["logits"])


@pytest.mark.sweep
def test_a_plan_is_saved_and_used(plain, tmp_path):
    expected, logits, _ = plain
    model = roomy(plain)
    steps(model, 5, expected)
    model.plan.save(tmp_path / "plan.json")
    again = remat.rematerialize(
        Language(), plan=tmp_path / "plan.json", numerics="rounding", limit_seconds=0.1
    )
    output, _ = steps(again, 4, expected)
    assert deferred(again) == deferred(model)
    assert again.plan.predicted_peak_bytes == model.plan.predicted_peak_bytes
    assert torch.equal(output["logits"], logits)


def test_a_name_that_is_not_there_is_refused(plain):
    with pytest.raises(remat.RematError, match="'loss', 'logits'"):
        trained(roomy(plain, outputs="losses"))


def test_with_other_ranks_all_are_made(plain, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 1)
    expected, _, _ = plain
    model = roomy(plain, outputs="loss")
    output, _ = steps(model, 5, expected)
    assert type(output["logits"]) is torch.Tensor


@pytest.mark.sweep
def test_with_an_optimizer_in_the_backward():
    eager, module = Language(), Language()
    for each in (eager, module):
        for parameter in each.parameters():
            own = torch.optim.SGD([parameter], lr=0.1)

            def hook(parameter, own=own):
                own.step()
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(hook)
    model = remat.rematerialize(module, budget="1GiB", numerics="rounding", limit_seconds=0.1)
    for _ in range(6):
        expected = trained(eager)
        output = trained(model)
        assert torch.equal(expected["loss"], output["loss"])
    for one, other in zip(eager.parameters(), module.parameters(), strict=True):
        assert torch.equal(one, other)
    assert deferred(model)
    assert "gradients leave" in str(model.plan)
    with pytest.raises(OutputGone):  # the weights of that step are gone
        output["logits"].sum()
    copied = copy.deepcopy(model)
    trained(copied)
