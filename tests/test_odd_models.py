"""Models as people write them: the right result, or an error of ours that says why not."""

import copy

import pytest
import torch
from exec_cases.training import assert_close, train
from integration_cases.odd_models import REFUSED, RIGHT, Made, linear, rows, squares
from torch import nn

import remat

LIMIT_SECONDS = 0.5


def rematerialized(model, args, kwargs):
    try:
        return remat.rematerialize(model, args, kwargs, budget=0.6, limit_seconds=LIMIT_SECONDS)
    except remat.BudgetTooSmall as error:
        enough = int(1.05 * error.smallest_bytes)  # found in half a second this time, too
        return remat.rematerialize(model, args, kwargs, budget=enough, limit_seconds=LIMIT_SECONDS)


@pytest.mark.parametrize(("make", "args", "kwargs", "loss"), RIGHT.values(), ids=RIGHT)
def test_trains_as_eager_does(make, args, kwargs, loss):
    torch.manual_seed(0)
    original = make().train()
    records = []
    for model in (rematerialized(copy.deepcopy(original), args, kwargs), original):
        records.append(train(model, lambda m, _: m(*args, **kwargs), loss))
    low = any(p.dtype in (torch.bfloat16, torch.half) for p in original.parameters())
    assert_close(*records, rtol=2e-2 if low else 1e-4)


@pytest.mark.parametrize(("make", "x", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is now deprecated")
def test_is_refused_with_a_reason_and_trains_on(make, x, message):
    torch.manual_seed(0)
    original = make().train()
    with pytest.raises(remat.CaptureError, match=message):
        remat.rematerialize(original, x, budget=0.6, limit_seconds=LIMIT_SECONDS)
    if not isinstance(original, nn.LazyLinear):
        output = original(x)
        (output[0] if isinstance(output, tuple) else output).sum().backward()
        assert any(parameter.grad is not None for parameter in original.parameters())


def test_the_last_batch_is_smaller():
    torch.manual_seed(0)
    original = nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.1), linear(16, 4))
    batches = [rows(64, 16), rows(64, 16), rows(3, 16)]
    records = [
        train(model, lambda m, step: m(batches[step]), squares, steps=3)
        for model in (rematerialized(copy.deepcopy(original), (batches[0],), {}), original)
    ]
    assert_close(*records)


def test_gradients_accumulate_over_batches_and_are_scaled_in_place():
    torch.manual_seed(0)
    original = nn.Sequential(linear(), nn.Tanh(), linear(16, 4))
    found = []
    for model in (rematerialized(copy.deepcopy(original), (rows(),), {}), original):
        for _ in range(3):
            squares(model(rows())).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        found.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_unit_of_a_larger_model_is_rematerialized():
    torch.manual_seed(0)
    original = nn.Sequential(linear(), nn.Sequential(linear(), nn.Tanh(), linear()), linear(16, 4))
    model = copy.deepcopy(original)
    model[1] = remat.rematerialize(model[1], budget=0.9, limit_seconds=LIMIT_SECONDS)
    records = [train(each, lambda m, _: m(rows()), squares) for each in (model, original)]
    assert_close(*records)
    assert model[1].plan.measured_peak_bytes <= model[1].plan.budget_bytes


def test_a_model_with_rematerialized_units_is_rematerialized_as_one():
    torch.manual_seed(0)
    original = nn.Sequential(linear(), nn.Sequential(linear(), nn.Tanh(), linear()), linear(16, 4))
    model = copy.deepcopy(original)
    unit = model[1] = remat.rematerialize(model[1], budget=0.9, limit_seconds=LIMIT_SECONDS)
    forward = unit.forward
    whole = rematerialized(model, (rows(),), {})
    records = [train(each, lambda m, _: m(rows()), squares) for each in (whole, original)]
    assert_close(*records)
    assert unit.forward is forward


def test_a_number_that_is_no_number_is_planned_for_once():
    def scaled(m, x, limit):
        return m.layer(x) * (2.0 if limit != limit else 1.0)  # noqa: PLR0124

    model = rematerialized(Made(scaled, layer=linear()), (rows(), float("nan")), {})
    plan = model.plan
    model(rows(), float("nan"))
    assert model.plan is plan
    model(rows(), 1.0)
    assert model.plan is not plan
