"""Outputs that are read before the backward, or kept by a hook: right, told of, made later on."""

import copy
import functools
import logging
import warnings

import pytest
import torch
from integration_cases.scores import LOW, check, messages, plain_step, steps_within, trained

import remat
from remat.session import deferring
from remat_exec import measure_peak


@pytest.fixture(scope="module")
def plain():
    return plain_step()


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
