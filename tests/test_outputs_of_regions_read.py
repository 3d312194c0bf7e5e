"""Outputs of several regions that are read before the backward: right, told of, made later on."""

import logging
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

import remat
from remat_exec import measure_peak


@pytest.fixture(scope="module")
def plain():
    return plain_step()


def test_what_is_read_in_a_recorded_step_does_not_refuse_those_after_it(plain):
    expected, _, peak_bytes = plain
    eager, budget = Language(), peak_bytes - LOGITS
    model = remat.rematerialize(Language(), budget=budget, outputs="loss", limit_seconds=0.1)
    for at, length in enumerate([TOKENS, 60, 52, 47, 61, 50, 40]):  # each new one is recorded
        ids = IDS[:, :length]
        trained(eager, ids)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained(model, ids, (lambda output: output["logits"] * 2) if at % 2 else len)
        assert all(map(torch.equal, gradients(model), gradients(eager)))
    steps(model, 2, expected)


@pytest.mark.sweep
def test_reading_is_told_of_in_a_step_that_is_recorded_in_part(plain):
    expected, _, _ = plain
    model = roomy(plain, outputs="loss")
    steps(model, 5, expected)
    budget = int(1.02 * model.plan.measured_peak_bytes)
    model = remat.rematerialize(
        Language(), budget=budget, numerics="rounding", outputs="loss", plan=model.plan
    )
    steps(model, 4, expected)
    model.whole = 2  # another graph from the second region on, which makes all in its first step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(model)
        model.whole = False
        trained(model)
    model.whole = 2
    with pytest.warns(remat.BudgetWarning, match="read before the backward"):
        trained(model, read=lambda output: output["logits"] * 1)


@pytest.mark.sweep
def test_what_is_read_in_the_loop_is_made(plain):
    expected, logits, _ = plain
    model = roomy(plain)
    seen = []
    output, _ = steps(model, 6, expected, lambda output: seen.append(output["logits"].sum()))
    assert type(output["logits"]) is torch.Tensor
    assert not deferred(model)
    assert torch.equal(torch.stack(seen), logits.sum().expand(6))


def test_what_one_step_of_several_reads_is_right_and_made_from_then_on(plain, caplog):
    expected, logits, _ = plain
    model = roomy(plain)
    steps(model, 5, expected)
    assert deferred(model)
    with caplog.at_level(logging.WARNING, "remat"):
        steps(model, 1, expected, lambda output: torch.equal(output["logits"], logits) or 1 / 0)
    assert "outputs=" in caplog.text
    output, _ = steps(model, 3, expected)
    assert type(output["logits"]) is torch.Tensor
    assert torch.equal(output["logits"], logits)
    assert not deferred(model)


@pytest.mark.parametrize("factor", [1.02, pytest.param(2.0, marks=pytest.mark.sweep)])
def test_reading_between_the_halves_is_told_if_it_may_be_over(plain, factor):
    expected, _, _ = plain
    model = roomy(plain, outputs="loss")
    steps(model, 5, expected)
    budget = int(factor * model.plan.measured_peak_bytes)
    model = remat.rematerialize(
        Language(), budget=budget, numerics="rounding", outputs="loss", plan=model.plan
    )
    steps(model, 4, expected)

    def read(output):
        output["copy"] = output["logits"] * 1

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with measure_peak() as peak:
            trained(model, read=read)
    assert any("read before the backward" in str(each.message) for each in told) == (factor < 2)
    assert (peak.peak_bytes > budget) == (factor < 2)
    assert all(map(torch.equal, gradients(model), expected))
    steps(model, 2, expected)
    assert deferred(model)  # named ones are made in no step


class Peeks(Language):
    """Eager code between two regions reads an output now and then."""

    every = 1

    def __init__(self):
        super().__init__()
        self.count, self.sums = 0, []

    @torch.compiler.disable
    def peek(self, logits):
        self.count += 1
        if self.count % self.every == 0:
            self.sums.append(float(logits.detach().sum()))

    def forward(self, ids):
        output = super().forward(ids)
        self.peek(output["logits"])
        scale = self.up.weight.square().mean()
        return {"loss": output["loss"] + scale, "logits": output["logits"]}


@pytest.mark.sweep
@pytest.mark.parametrize("every", [1, 6])
def test_what_code_between_regions_reads_is_right(every):
    eager, module = Peeks(), Peeks()
    eager.every = module.every = every
    model = remat.rematerialize(module, budget="1GiB", numerics="rounding", limit_seconds=0.1)
    for _ in range(9):
        expected = trained(eager)
        output = trained(model)
        assert all(map(torch.equal, gradients(model), gradients(eager)))
    assert module.sums == eager.sums
    assert torch.equal(output["logits"], expected["logits"])
    assert not deferred(model)


LARGE = 2**20  # numbers, which nothing can plan


@torch.compiler.disable
def weighed(x):
    return x * (1 + torch.zeros(LARGE).sum())


class Weighed(torch.nn.Module):
    """Two regions, between which code takes more than all else."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)
        )

    def forward(self, x):
        x = weighed(self.layers(x))
        return {"loss": x.square().mean(), "sines": x.sin(), "cosines": (x * 2).cos()}


def test_steps_are_refused_at_once_where_all_outputs_are_far_less_than_what_is_missing():
    """Else what is over would be laid to outputs, and steps that read some go on for long."""
    model = remat.rematerialize(Weighed(), budget=2 * LARGE, limit_seconds=0.1)

    def train():
        for _ in range(5):
            output = model(torch.randn(256, 16))
            output["sines"].sum().item()
            output["loss"].backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(remat.BudgetTooSmall):
            train()
    told = [str(each.message) for each in caught]
    assert any("more than the budget" in each for each in told)
    assert not any("read" in each for each in told)


def test_steps_that_read_are_refused_in_the_end_where_no_plan_fits():
    model = remat.rematerialize(Weighed(), budget=4 * LARGE - 2**16, limit_seconds=0.1)
    x, over, told = torch.randn(256, 16), 0, 0
    with pytest.raises((remat.BudgetTooSmall, remat.BudgetExceeded)):  # noqa: PT012
        for _ in range(12):
            model.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with measure_peak() as peak:
                    output = model(x)
                    output["sines"].sum().item()
                    output["loss"].backward()
            over += peak.peak_bytes > 4 * LARGE - 2**16
            told += any("more than the budget" in str(each.message) for each in caught)
    assert told + 1 >= over >= 4  # the last is raised, and each is told of at the next
