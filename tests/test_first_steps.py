"""The first step by a plan is held against the budget; what was not planned for is learned."""

import copy
import gc
import itertools
import warnings

import pytest
import torch
from integration_cases.sweeps import swept
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import remat
from remat_exec import Executable

LIMIT_SECONDS = 0.1
WAYS = ("by example", "later", "compiled")


pytestmark = pytest.mark.usefixtures("_no_record_stays")


def stack(width=64, depth=12):
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
    return nn.Sequential(*layers)


def batch(rows=256, width=64):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def greedy(output):
    """Keep nine buffers of the size of the output, where three are allowed."""
    for _ in range(8):
        output = torch.sin(output)
    return output.square().mean()


def budget_for(share, loss=greedy):
    """A share of the peak of a plain step with the loss."""
    plain = remat.plan(stack(), batch(), budget=0.99, loss=loss, limit_seconds=LIMIT_SECONDS)
    return int(share * plain.plain_peak_bytes)


def planned(way, model, x, budget, **options):
    options = {"budget": budget, "limit_seconds": LIMIT_SECONDS, **options}
    if way == "compiled":
        torch._dynamo.reset()
        return torch.compile(model, backend="remat", options=options)
    return remat.rematerialize(model, *([x] if way == "by example" else []), **options)


def step(model, x, optimizer=None, loss=greedy):
    """One step as it is written most often; gives what was told."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", remat.BudgetWarning)
        value = loss(model(x))
        if optimizer is not None:
            optimizer.zero_grad()
        value.backward()
        if optimizer is not None:
            optimizer.step()
    return [str(one.message) for one in told if one.category is remat.BudgetWarning]


def measured_step(model, x, loss=greedy):
    model.zero_grad()
    with remat.measure_peak() as peak:
        assert step(model, x, loss=loss) == []
    return peak.peak_bytes


def gradients_equal(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.grad, b.grad) for a, b in pairs)


def is_recorded():
    return torch._C._autograd._profiler_enabled()


@pytest.mark.parametrize("way", swept(WAYS, ["by example"]))
def test_a_loss_that_takes_more_than_is_allowed_is_told_of_and_planned_for(way):
    x, budget, own, plain = batch(), budget_for(0.7), stack(), stack()
    model = planned(way, own, x, budget)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    told = []
    for _ in range(5):
        told.append(step(model, x, optimizer))
        step(plain, x, reference)
        assert gradients_equal(own, plain)
    assert len(told[0]) == 1
    assert "more than the budget" in told[0][0]
    assert "such as a loss, takes" in told[0][0]
    assert told[1:] == [[]] * 4
    assert measured_step(model, x) <= budget
    model(x)
    assert not is_recorded()


def test_first_steps_are_recorded_in_measured_blocks():
    x, budget = batch(), budget_for(0.7)
    model = planned("later", stack(), x, budget)
    told, peaks = [], []
    for _ in range(3):
        model.zero_grad()
        with remat.measure_peak() as outer, remat.measure_peak() as inner:
            told.append(step(model, x))
        assert outer.peak_bytes == inner.peak_bytes
        peaks.append(outer.peak_bytes)
    assert peaks[0] > budget
    assert told == [[], told[1], []]  # there is no optimizer: it is told at the next forward
    assert f"took {peaks[0]:,} bytes" in told[1][0]
    assert max(peaks[1:]) <= budget


@pytest.mark.sweep
def test_a_loss_that_was_handed_over_is_told_of_if_another_one_runs():
    x, budget = batch(), budget_for(0.7)
    model = planned("later", stack(), x, budget, loss=lambda output: output.mean())
    told = list(
        itertools.chain(*(step(model, x, torch.optim.SGD(model.parameters())) for _ in "12"))
    )
    assert len(told) == 1
    assert "more than the budget" in told[0]
    assert measured_step(model, x) <= budget


def test_a_step_within_the_budget_tells_nothing_and_leaves_nothing():
    before = set(_global_optimizer_pre_hooks)
    model, x = planned("later", stack(), batch(), 0.8), batch()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        assert step(model, x, optimizer, loss=lambda output: output.mean()) == []
        assert not is_recorded()
    assert len(set(_global_optimizer_pre_hooks) - before) <= 1  # one for the process


@pytest.mark.sweep
def test_other_sizes_begin_with_what_was_seen():
    x, budget = batch(), budget_for(0.7)
    model = planned("later", stack(), x, budget)
    optimizer = torch.optim.SGD(model.parameters())
    assert step(model, x, optimizer)
    for rows in (200, 250, 120):
        assert step(model, batch(rows), optimizer) == []
        assert measured_step(model, batch(rows)) <= budget


def test_what_no_plan_has_room_for_is_told_and_trains_on():
    x, plain = batch(), stack()
    model = planned("by example", stack(), x, budget_for(0.7, loss=lambda output: output.mean()))

    def hungry(output):
        return sum(torch.sin(output * number).square().mean() for number in range(1, 40))

    told = []
    for _ in range(4):
        model.zero_grad()
        told.append(step(model, x, loss=hungry))
    plain.zero_grad()
    step(plain, x, loss=hungry)
    assert gradients_equal(model, plain)
    assert told[0] == told[2] == told[3] == []  # without an optimizer it is judged a step later
    assert "more than the budget" in told[1][0]
    assert "no plan leaves room" in told[1][1]


def test_hooks_that_take_memory_in_the_backward_are_told_of():
    x, held = batch(), []
    model = planned("by example", stack(), x, budget_for(0.6, loss=lambda output: output.mean()))
    model[0][0].weight.register_post_accumulate_grad_hook(lambda _: held.append(torch.ones(2**20)))
    told = []
    for _ in range(4):
        model.zero_grad()
        told.append(step(model, x, loss=lambda output: output.mean()))
    assert [len(each) for each in told] == [0, 0, 1, 0]  # once may be what an optimizer keeps
    assert "hooks of parameters" in told[2][0]


@pytest.mark.sweep
def test_the_profiler_is_free_once_an_optimizer_steps():
    model, x = planned("later", stack(), batch(), 0.8), batch()
    optimizer = torch.optim.SGD(model.parameters())
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=1)
    ) as seen:
        for _ in range(3):
            step(model, x, optimizer, loss=lambda output: output.mean())
            seen.step()
    assert len(seen.events())


def test_an_output_that_is_dropped_ends_the_recording():
    model, x = planned("later", stack(), batch(), 0.8), batch()
    output = model(x)
    assert is_recorded()
    del output
    gc.collect()
    assert not is_recorded()


def test_another_optimizer_between_forward_and_backward_does_not_end_it():
    x, other = batch(), nn.Parameter(torch.ones(3))
    model = planned("later", stack(), x, budget_for(0.7))
    optimizers = [torch.optim.SGD(model.parameters()), torch.optim.SGD([other])]

    def loss(output):
        other.grad = torch.ones(3)
        optimizers[1].step()
        return greedy(output)

    assert len(step(model, x, optimizers[0], loss)) == 1


class Broken(nn.Module):
    """Three regions."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(stack() for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("make", [stack, pytest.param(Broken, marks=pytest.mark.sweep)])
def test_a_plan_is_made_within_a_measured_block_and_not_measured_with_it(make):
    model, x = planned("later", make(), batch(), "8MiB"), batch()
    peaks = []
    for _ in range(4):
        model.zero_grad()
        with remat.measure_peak() as peak:
            step(model, x, loss=lambda output: output.mean())
        peaks.append(peak.peak_bytes)
    assert 0 < max(peaks) <= 2**23
    assert peaks[0] <= 1.1 * peaks[-1]


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::remat.BudgetWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize("way", WAYS)
def test_two_models_in_one_step(way):
    """The second begins while the first is recorded, as in an adversary's step.

    It is what the first has between its halves, and may be told of as that.
    """
    x = batch()
    makers, judges = (stack(), stack()), (stack(), stack())
    budget = budget_for(0.9)
    trained = [planned(way, model, x, budget) for model in (makers[0], judges[0])]
    for maker, judge in ([*trained], [makers[1], judges[1]]):
        for _ in range(3):
            for model in (maker, judge):
                model.zero_grad()
            judge(maker(x)).mean().backward()
            fake = maker(x).detach()
            (judge(fake).mean() + judge(x).mean()).backward()
    assert gradients_equal(*makers)
    assert gradients_equal(*judges)


def test_a_closure_that_runs_the_step_again_within_the_optimizers():
    x, own, plain = batch(), stack(), stack()
    trained = planned("later", own, x, budget_for(0.9))
    for model, parameters in ((trained, own.parameters()), (plain, plain.parameters())):
        optimizer = torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    pairs = zip(own.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_ctrl_c_within_a_recorded_forward(monkeypatch):
    x, own, plain = batch(), stack(), stack()
    model = planned("by example", own, x, budget_for(0.9))

    def interrupted(*_, **__):
        assert is_recorded()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Executable, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    assert not is_recorded()
    for each in (model, plain):
        each(x).mean().backward()
    assert gradients_equal(own, plain)


@pytest.mark.parametrize("way", swept(WAYS, ["later"]))
def test_a_checkpoint_around_the_model(way):
    """Its forward runs again within the backward, where nothing may begin or end a recording."""
    x, own, plain = batch(), stack(), stack()
    trained = planned(way, own, x, budget_for(0.9))
    for _ in range(3):
        for model in (trained, plain):
            model.zero_grad()
            read = x.clone().requires_grad_()
            checkpoint(model, read, use_reentrant=True).square().mean().backward()
        assert gradients_equal(own, plain)


@pytest.mark.sweep
def test_a_copy_made_between_forward_and_backward():
    x, own, plain = batch(), stack(), stack()
    model = planned("by example", own, x, budget_for(0.9))
    loss = model(x).mean()
    copied = copy.deepcopy(model)
    loss.backward()
    plain(x).mean().backward()
    assert gradients_equal(own, plain)
    assert all(parameter.grad is None for parameter in copied.parameters())
    copied(x).mean().backward()
    assert gradients_equal(copied, plain)


class Penalised(nn.Module):
    """Adds a penalty on the gradient of what a layer gives, which no graph holds."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.score, self.drop = nn.Linear(16, 1), nn.Dropout(0.5)

    def forward(self, x):
        x = self.drop(self.body(x)).detach().requires_grad_() + self.body(x)
        torch._dynamo.graph_break()
        score = self.score(self.body(x)).tanh().sum()
        (gradient,) = torch.autograd.grad(score, x, create_graph=True)
        return score + gradient.square().sum()


@pytest.mark.sweep
def test_a_gradient_of_a_gradient_within_the_first_forward_runs_as_it_is():
    torch.manual_seed(0)
    plain = Penalised()
    model = remat.rematerialize(copy.deepcopy(plain), budget="1MiB")
    for number, rows in enumerate((8, 4, 6, 8, 5)):
        x = torch.randn(rows, 16)
        for each in (model, plain):
            torch.manual_seed(number)
            each.zero_grad()
            each(x).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
