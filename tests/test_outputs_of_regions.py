"""Outputs of several regions that nobody reads are not made, and are right when they are read."""

import copy
import logging
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import remat
from remat_exec import OutputGone, measure_peak
from remat_exec.deferred import DeferredTensor

WORDS, WIDTH, TOKENS = 3000, 16, 64
IDS = torch.randint(WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(0))
LOGITS = 2 * TOKENS * WORDS * 4


class Head(nn.Module):
    """The last layer with its loss, which returns the scores as well."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x, ids):
        logits = self.out(functional.dropout(x, 0.1))
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


class Language(nn.Module):
    """A language model of two regions; what is `between` them runs in eager autograd."""

    def __init__(self, *, whole=False):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = Head()
        self.whole = whole

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.down(functional.gelu(self.up(x)))
        if self.whole != 1:
            torch._dynamo.graph_break()
        if self.whole == 2:
            x = x.sin()
        loss, logits = self.head(x, ids)
        return {"loss": loss, "logits": logits}


def trained(model, ids=IDS, read=lambda output: None):
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    output = model(ids)
    read(output)
    output["loss"].backward()
    return output


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture(scope="module")
def plain():
    model = Language()
    output = trained(model)
    expected = gradients(model)
    with measure_peak() as peak:
        trained(model)
    return expected, output["logits"].detach(), peak.peak_bytes


def deferred(model):
    return [each for kind in model.plan.kinds for each in kind.deferred]


def steps(model, count, expected, read=lambda output: None, ids=IDS):
    """Train on the same, without a warning; give the last output and peak."""
    for _ in range(count):
        with measure_peak() as peak:
            output = trained(model, ids, read)
        assert all(map(torch.equal, gradients(model), expected))
    return output, peak.peak_bytes


def several_steps(model, read):
    for _ in range(7):
        trained(model, IDS, read)


def roomy(plain, **options):
    options = {"numerics": "rounding", "limit_seconds": 0.1, **options}
    model = Language(whole="regions" in options)
    return remat.rematerialize(model, budget=2 * plain[2], **options)


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
