"""A loss outside the model: the budget covers what it takes, if it is known or ordinary."""

import copy

import pytest
import torch
from exec_cases.training import assert_bitwise_equal, train
from torch import nn

import remat
from remat_exec import with_call

LIMIT_SECONDS = 0.1
CLASSES = 96


class Two(nn.Module):
    """Wide logits, which are a view, and features beside them that a loss may leave out."""

    def __init__(self, dtype=torch.float32, depth=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48, dtype=dtype) for _ in range(depth))
        self.head = nn.Linear(48, CLASSES, dtype=dtype)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x), torch.sigmoid(x)


def batch(dtype=torch.float32):
    return torch.randn(8, 32, 48, dtype=dtype, generator=torch.Generator().manual_seed(1))


def two(dtype=torch.float32, depth=16):
    torch.manual_seed(0)
    return Two(dtype, depth)


def shallow():
    """Make the same model where no budget is at stake, or a plan may store everything."""
    return two(depth=2)


def cross_entropy(output):
    """Of the logits alone, in 32 bits."""
    logits = output[0].flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, torch.arange(len(logits)) % CLASSES)


def greedy(output):
    """A loss that keeps six buffers the size of the logits."""
    logits, features = output
    for _ in range(6):
        logits = torch.sin(logits)
    return logits.mean() + features.mean()


def planned(model, x, loss=None, budget=0.9):
    return remat.rematerialize(model, (x,), budget=budget, limit_seconds=LIMIT_SECONDS, loss=loss)


def peak_of_a_step(model, x, loss):
    model.zero_grad()
    with remat.measure_peak() as peak:
        output = model(x)
        loss(output).backward()
    return peak.peak_bytes


def test_a_loss_that_takes_much_is_planned_for_once_it_is_known():
    x = batch()
    known = planned(two(), x, greedy)
    unknown = planned(two(), x, budget=known.plan.budget_bytes)
    assert peak_of_a_step(unknown, x, greedy) > unknown.plan.budget_bytes
    peak = peak_of_a_step(known, x, greedy)
    assert peak <= known.plan.budget_bytes
    assert peak == pytest.approx(known.plan.predicted_peak_bytes, rel=0.03)
    assert known.plan.plain_peak_bytes == pytest.approx(peak_of_a_step(two(), x, greedy), rel=0.01)


@pytest.mark.parametrize(
    "loss",
    [cross_entropy, pytest.param(lambda out: out[0].square().mean(), marks=pytest.mark.sweep)],
)
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.sweep), torch.bfloat16]
)
def test_an_ordinary_loss_of_any_precision_fits_into_the_allowance(dtype, loss):
    x = batch(dtype)
    model = planned(two(dtype), x, budget=0.8)
    assert model.plan.recomputations
    assert peak_of_a_step(model, x, loss) <= model.plan.budget_bytes


def test_what_a_loss_leaves_out_is_not_planned_for(caplog):
    x = batch()
    caplog.set_level("INFO", logger="remat")
    model = planned(two(), x, cross_entropy, budget=0.8)
    plan = model.plan
    record = train(model, lambda m, _: m(x), cross_entropy)
    assert_bitwise_equal(record, train(two(), lambda m, _: m(x), cross_entropy))
    assert model.plan is plan
    assert "replanned" not in caplog.text
    assert peak_of_a_step(model, x, cross_entropy) <= plan.budget_bytes


def test_measuring_a_loss_leaves_no_trace():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.leave = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x):
            return self.leave(torch.dropout(self.norm(x), 0.5, train=True))

    model, x = Noisy(), torch.randn(16, 8)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    planned(model, x, lambda out: torch.dropout(out, 0.5, train=True).sum(), budget="100kB")
    assert torch.equal(torch.get_rng_state(), before[1])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[0][name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_measuring_a_loss_stores_nothing_on_the_model():
    class Storing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls, self.last = nn.Linear(8, 8), 0, None
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.steps += 1
            self.calls += 1
            output = self.layer(x)
            self.last = output.detach()
            return output

    x, original = torch.randn(16, 8), Storing()
    steps = original.steps
    model = planned(original, x, lambda output: output.square().mean(), budget="100kB")
    assert (model.calls, model.last, int(steps)) == (0, None, 0)
    assert model.steps is original.steps is steps
    for size in (16, 4):  # the second is planned for within training
        output = model(x[:size])
        assert torch.equal(model.last, output.detach())
    assert (model.calls, int(model.steps), int(original.steps)) == (2, 2, 2)
    assert model.steps is steps


@pytest.mark.sweep
def test_a_budget_too_small_for_the_loss_says_what_would_do():
    x = batch()
    with pytest.raises(remat.BudgetTooSmall) as caught:
        planned(two(), x, greedy, budget="100kB")
    smallest = caught.value.smallest_bytes
    assert peak_of_a_step(planned(two(), x, greedy, budget=smallest), x, greedy) <= smallest


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda _: 1 / 0, "ZeroDivisionError"),
        (lambda out: out[0], "one element"),
        (lambda _: 3.0, "one element, not float"),
        (lambda out: out[0].detach().sum(), "depends on nothing"),
        (lambda _: torch.ones((), requires_grad=True), "depends on nothing"),
    ],
)
def test_a_loss_that_cannot_be_measured_is_refused(loss, reason):
    with pytest.raises(remat.LossError, match=reason):
        planned(shallow(), batch(), loss)


def test_a_loss_that_could_not_be_run_is_refused_before_anything_is():
    with pytest.raises(remat.RematError, match="cannot be called"):
        planned(shallow(), batch(), 0.5)
    with pytest.raises(remat.RematError, match="estimated costs run nothing"):
        remat.plan(shallow(), batch(), budget=0.5, costs="estimate", loss=greedy)


def test_a_view_that_the_model_returns_can_be_changed_in_place():
    def changed(model, _):
        logits, features = model(batch())
        logits.div_(2.0)
        logits[:, 0] = 1.0
        return logits, features

    model = planned(two(), batch(), budget=0.8)
    assert model.plan.recomputations
    expected = train(two(), changed, cross_entropy)
    assert_bitwise_equal(train(model, changed, cross_entropy), expected)


def test_a_backward_over_more_than_the_loss_uses_gives_every_gradient():
    x = batch()
    model, eager = planned(shallow(), x, lambda out: out[1].sum(), budget="1GiB"), shallow()
    for each in (model, eager):
        logits, features = each(x)
        (logits.square().mean() + features.mean()).backward()
    for name, parameter in eager.named_parameters():
        assert torch.equal(parameter.grad, dict(model.named_parameters())[name].grad), name


def test_backwards_over_other_outputs_than_the_loss_uses_can_follow_one_another():
    x = batch()
    model, eager = planned(shallow(), x, cross_entropy, budget="1GiB"), shallow()
    losses = [lambda out: out[1].mean(), cross_entropy, lambda out: out[0].mean() + out[1].sum()]
    for loss in [*losses, *losses]:
        eager.zero_grad()
        loss(eager(x)).backward()
        try:
            model.zero_grad()
            loss(model(x)).backward()
        except remat.BackwardError:  # what the plan did not keep; it is planned anew
            model.zero_grad()
            loss(model(x)).backward()
        for parameter, expected in zip(model.parameters(), eager.parameters(), strict=True):
            if expected.grad is None:
                assert parameter.grad is None
            else:
                assert torch.equal(parameter.grad, expected.grad)


def test_gradients_that_a_loss_leaves_elsewhere_are_covered():
    criterion = nn.Linear(CLASSES, 400)

    def through_parameters(output):
        return criterion(output[0]).square().mean()

    def decayed(output):
        weights = sum(parameter.square().sum() for parameter in model.parameters())
        return output[0].square().mean() + 1e-4 * weights

    x, model = batch(), shallow()
    for loss in (through_parameters, decayed):
        small = planned(model, x, loss, budget=1.0)
        criterion.zero_grad()
        peak = peak_of_a_step(small, x, loss)
        assert peak <= small.plan.budget_bytes
        assert peak <= small.plan.predicted_peak_bytes + 64  # of the loss's own gradient


def test_gradients_in_another_layout_than_their_outputs_are_covered():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(48, 64)
            self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x):
            x = torch.tanh(self.enter(x.flatten(0, 1)))
            return [torch.sigmoid(head(x)).t() for head in self.heads]

    def loss(outputs):
        targets = torch.arange(64)
        return sum(nn.functional.cross_entropy(output[:, :256], targets) for output in outputs)

    torch.manual_seed(0)
    model = planned(Heads(), batch(), loss, budget="1.2MB")
    assert peak_of_a_step(model, batch(), loss) <= model.plan.budget_bytes
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


def test_a_loss_may_change_its_argument_and_use_either_name_of_an_output():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(48, 48)

        def forward(self, x):
            y = self.layer(x)
            return {"first": y, "second": y}

    def loss(output):
        return output["first"].mul_(2.0).square().mean()

    x = batch()
    model = planned(Named(), x, loss, budget=1.0)
    assert peak_of_a_step(model, x, loss) <= model.plan.budget_bytes


def test_a_loss_is_measured_under_the_autocast_of_the_call():
    head = nn.Linear(CLASSES, 4)

    def loss(output):
        return head(output[0]).square().mean()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = planned(shallow(), batch(), loss, budget=1.0)
        assert peak_of_a_step(model, batch(), loss) <= model.plan.budget_bytes


def test_a_loss_that_asks_for_the_call_is_told_it_so_a_last_smaller_batch_works():
    class Classes(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = shallow()

        def forward(self, x, *, target=None):
            return self.body(x)[0]

    def of_the_call(logits, x, *, target):
        assert logits.shape[:2] == x.shape[:2]
        return nn.functional.cross_entropy(logits.flatten(0, 1), target)

    model = remat.rematerialize(
        Classes(), budget=0.9, limit_seconds=LIMIT_SECONDS, loss=of_the_call
    )
    for size in (8, 3):
        x, target = batch()[:size], torch.arange(32 * size) % CLASSES
        for _ in range(3):  # planned; then for outputs that were let go of
            of_the_call(model(x, target=target), x, target=target).backward()
        model.zero_grad()
        with remat.measure_peak() as peak:
            of_the_call(model(x, target=target), x, target=target).backward()
        assert peak.peak_bytes <= model.plan.budget_bytes


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (lambda output: (output,), 1),
        (lambda output, scale=2: (output, scale), 2),
        (lambda output, x: (output, x), 2),
        (lambda output, *call: (output, *call), 2),
        (lambda output, **named: (output, *named), 2),
    ],
)
def test_a_loss_is_told_the_call_only_if_it_asks(loss, given):
    args, kwargs = ((), {"x": 5}) if "named" in loss.__code__.co_varnames else ((5,), {})
    found = with_call(loss, args, kwargs)("output")
    assert found[0] == "output"
    assert len(found) == given
    assert loss.__defaults__ is None or found[1] == 2


def test_a_plan_alone_tells_the_loss_the_call():
    def of_the_call(output, x):
        assert x.shape == batch().shape
        return output[0].square().mean()

    plan = remat.plan(
        shallow(), (batch(),), budget=0.9, loss=of_the_call, limit_seconds=LIMIT_SECONDS
    )
    assert plan.measured_peak_bytes is None


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "l1_loss"])
def test_the_buffer_that_a_loss_lies_in_is_counted_while_the_user_holds_it(name):
    """That of the first two is as large as their input."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 32, 3))
    x, target = torch.randn(4, 3, 16, 16), torch.randn(4, 32, 12, 12)

    def loss(output):
        return getattr(nn.functional, name)(output, target)

    planned = remat.rematerialize(model, x, budget=1.0, limit_seconds=LIMIT_SECONDS, loss=loss)
    for _ in range(2):  # what is let go of is found out in the first
        loss(planned(x)).backward()
    planned.zero_grad()
    with remat.measure_peak() as peak:
        loss(planned(x)).backward()
    assert peak.peak_bytes <= planned.plan.budget_bytes
    assert peak.peak_bytes <= planned.plan.predicted_peak_bytes + 64  # of the loss's own gradient
