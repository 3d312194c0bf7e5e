"""Outputs that nobody reads are not made, and what is read is right and within the budget."""

import copy
import functools
import logging
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import remat
from remat.session import deferring
from remat_exec import Executable, OutputGone, measure_peak
from remat_exec.deferred import DeferredTensor

WORDS, WIDTH, TOKENS = 3000, 16, 64


@dataclass
class Returned:
    """What a model of transformers returns, in short."""

    loss: torch.Tensor
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Language(nn.Module):
    """A language model with many more words than width, that returns its scores as well."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        x = x + functional.dropout(self.down(functional.gelu(self.up(x))), 0.1)
        logits = self.head(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return Returned(loss, logits, (x,))


def trained(model, ids, read=lambda output: None):
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    output = model(ids)
    read(output)
    output.loss.backward()
    return output


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    model, ids = Language(), torch.randint(WORDS, (2, TOKENS))
    output = trained(model, ids)
    gradients = [parameter.grad for parameter in model.parameters()]
    with measure_peak() as peak:
        trained(model, ids)
    model.zero_grad(set_to_none=True)
    return model, ids, output.logits.detach(), gradients, peak.peak_bytes


def check(model, gradients):
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        error = (parameter.grad - expected).abs().max()
        assert error <= 1e-6 * expected.abs().max()


def steps_within(model, ids, budget, count, read=lambda output: None):
    for _ in range(count):
        with measure_peak() as peak:
            output = trained(model, ids, read)
        assert peak.peak_bytes <= budget
    return output


def messages(caplog):
    return [each for each in caplog.records if each.name.startswith("remat.")]


LOW = 0.2  # of plain: below what any plan takes that makes the logits


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


@pytest.mark.sweep
def test_what_the_first_step_reads_is_made(plain):
    model, ids, logits, gradients, peak_bytes = plain
    budget = int(0.9 * peak_bytes)
    made = remat.rematerialize(copy.deepcopy(model), ids, budget=budget, numerics="rounding")
    steps_within(made, ids, budget, 3, lambda output: output.logits.argmax(-1))
    assert not made.plan.kinds[0].deferred
    output = trained(made, ids)
    assert type(output.logits) is torch.Tensor
    check(made, gradients)
    assert torch.equal(output.logits, logits)


def test_what_a_later_step_reads_is_made_from_then_on(plain, caplog):
    model, ids, logits, gradients, peak_bytes = plain
    budget = int(0.9 * peak_bytes)
    made = remat.rematerialize(copy.deepcopy(model), ids, budget=budget, numerics="rounding")
    output = steps_within(made, ids, budget, 3)
    with caplog.at_level(logging.WARNING, "remat"):
        assert torch.equal(output.logits, logits)
    assert len(messages(caplog)) == 1
    output = steps_within(made, ids, budget, 1)
    assert type(output.logits) is torch.Tensor
    assert not made.plan.kinds[0].deferred
    check(made, gradients)


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


def test_reading_between_the_halves_over_the_budget_is_told(plain):
    model, ids, logits, gradients, peak_bytes = plain
    made = remat.rematerialize(
        copy.deepcopy(model), ids, budget=int(LOW * peak_bytes), numerics="rounding",
        outputs="loss",
    )  # fmt: skip

    def read(output):
        assert torch.equal(output.logits, logits)

    with pytest.warns(remat.BudgetWarning, match="outputs=") as told, measure_peak() as peak:
        trained(made, ids, read)
    assert peak.peak_bytes > made.plan.budget_bytes
    assert any("is held" in str(each.message) for each in told)
    check(made, gradients)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(made, ids)


@pytest.mark.sweep
def test_what_a_loop_makes_of_an_output_that_it_reads_is_told_if_it_is_over(plain):
    model, ids, logits, _, peak_bytes = plain
    size = logits.untyped_storage().nbytes()
    low = int(LOW * peak_bytes)
    options = {"numerics": "rounding", "outputs": "loss"}
    planned = remat.plan(model, ids, budget=low, **options)
    roomy = low + size + size // 2  # the output alone has room
    made = remat.rematerialize(copy.deepcopy(model), ids, budget=roomy, plan=planned, **options)

    def read(output):
        output.kept = [output.logits.detach() * factor for factor in (1, 2, 3)]

    with measure_peak() as peak:
        trained(made, ids, read)
    assert peak.peak_bytes > roomy
    with pytest.warns(remat.BudgetWarning, match="was read in it"):
        trained(made, ids)


@pytest.mark.sweep
def test_a_second_loss_over_it_is_seen_in_the_first_step(plain):
    model, ids, _, _, peak_bytes = plain

    def run(model):
        torch.manual_seed(7)
        model.zero_grad(set_to_none=True)
        output = model(ids)
        (output.loss + output.logits.square().mean()).backward()

    eager = copy.deepcopy(model)
    run(eager)
    made = remat.rematerialize(
        copy.deepcopy(model), ids, budget=2 * peak_bytes, numerics="rounding"
    )
    for _ in range(3):
        run(made)
        check(made, [parameter.grad for parameter in eager.parameters()])
    assert not made.plan.kinds[0].deferred

    expected = [parameter.grad for parameter in eager.parameters()]
    both = ["loss", "logits"]
    named = remat.rematerialize(copy.deepcopy(model), ids, budget=2 * peak_bytes, outputs=both)
    run(named)
    check(named, expected)
    named = remat.rematerialize(copy.deepcopy(model), ids, budget=2 * peak_bytes, outputs="loss")
    for _ in range(2):  # the second is planned for
        run(named)
        check(named, expected)


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


def keep_in(kept, module, args, scores):
    kept["scores"] = scores.exp()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by TorchDynamo
@pytest.mark.parametrize(
    "way",
    [
        "rematerialize",
        pytest.param("compile", marks=pytest.mark.sweep),
        pytest.param("in two regions", marks=pytest.mark.sweep),
    ],
)
def test_what_a_hook_keeps_is_made_though_the_model_does_not_return_it(plain, way, monkeypatch):
    """It may be read after the optimizer's step, when it can be made no more."""
    monkeypatch.setattr(deferring, "_with_outputs_if_faster", lambda *args: args[2])
    last = {}
    for is_plain in (True, False):
        model, kept = copy.deepcopy(plain[0]), {}
        model.head.register_forward_hook(functools.partial(keep_in, kept))
        if way == "in two regions":
            model.down.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        options = {"budget": 2 * plain[-1], "numerics": "rounding", "limit_seconds": 0.1}
        if not is_plain and way == "compile":
            torch.compiler.reset()  # models of other tests had the same code
            model.compile(backend="remat", options=options)
        elif not is_plain:
            model = remat.rematerialize(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            trained(model, plain[1])
            optimizer.step()
        last[is_plain] = kept.pop("scores").detach().sum(-1)
    torch.testing.assert_close(last[False], last[True])
