"""Another backward over a graph that is kept: the forward runs again, and gradients are eager's."""

import random

import pytest
import torch
from exec_cases.schedules import random_schedule
from exec_cases.training import assert_close, train
from torch import nn
from torch.nn.functional import gelu

from remat_exec import BackwardError, BudgetExceeded, Executable, MemoryChanged, Repeats
from remat_graph.torch import capture


class Heads(nn.Module):
    """Two outputs of one trunk, which draws, and counts what it sees."""

    def __init__(self, within=lambda model, x: x):
        super().__init__()
        self.enter, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.25), nn.Linear(32, 8))
        self.left, self.right, self.within = nn.Linear(8, 4), nn.Linear(8, 1), within
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x):
        x = self.within(self, self.trunk(gelu(self.norm(self.enter(x)))))
        return self.left(x), self.right(x)


class Planned(nn.Module):
    """Runs a plan that recomputes, of a model that it holds."""

    def __init__(self, module, x):
        super().__init__()
        captured = capture(module, (x,), costs="estimate")
        schedule = random_schedule(captured.graph, random.Random(0))
        self.module, self.executable = module, Executable(captured, schedule)
        self.options = {}

    def forward(self, x):
        return self.executable(self.module, [x], **self.options)


def batch():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def made(*arguments):
    torch.manual_seed(0)
    return Heads(*arguments)


def in_turn(outputs):
    left, right = outputs
    left.square().sum().backward(retain_graph=True)
    torch.rand(3)  # what others draw meanwhile
    right.square().sum().backward(retain_graph=True)
    return (left.sum() * right.sum()).mean()


def test_gradients_buffers_and_generators_are_eagers():
    x = batch()
    records = [
        train(model, lambda model, _: model(x), in_turn, steps=3)
        for model in (Planned(made(), x), made())
    ]
    assert_close(*records, rtol=1e-5)


def test_gradients_of_parts_in_turn():
    x, found = batch(), []
    for model in (Planned(made(), x), made()):
        torch.manual_seed(2)
        parameters = list(model.parameters())
        left, right = model(x)
        options = {"retain_graph": True, "allow_unused": True}
        found.append(
            [torch.autograd.grad(one.sum(), parameters, **options) for one in (left, right)]
        )
    for one, other in zip(*found, strict=True):
        for got, expected in zip(one, other, strict=True):
            assert (got is None) == (expected is None)
            if got is not None:
                torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


def decides(model, x):
    return x + x.topk(2, dim=1).values.sum(1, keepdim=True)


def counts(model, x):
    x = x + model.seen
    model.seen.mul_(0.5)
    return x


def counts_first(model, x):
    model.seen.add_(1)
    return x * model.seen.mean()


@pytest.mark.parametrize("within", [decides, counts, counts_first])
def test_a_forward_that_would_give_something_else_is_not_run_again(within):
    x = batch()
    left, right = Planned(made(within), x)(x)
    left.sum().backward(retain_graph=True)
    with pytest.raises(BackwardError, match="decides something"):
        right.sum().backward()


def test_without_a_graph_that_is_kept_it_is_refused():
    x = batch()
    left, right = Planned(made(), x)(x)
    left.sum().backward()
    with pytest.raises(BackwardError, match="second time"):
        right.sum().backward()


def test_where_nothing_is_to_repeat_it_is_refused():
    x = batch()
    planned = Planned(made(), x)
    planned.options = {"repeats": None}
    left, right = planned(x)
    left.sum().backward(retain_graph=True)
    with pytest.raises(BackwardError, match="second time"):
        right.sum().backward()


@pytest.mark.parametrize("holds", [False, True])
def test_inputs_may_be_let_go_of_if_they_are_held(holds):
    planned = Planned(made(), batch())
    planned.options = {"repeats": Repeats(holds_inputs=holds)}
    left, right = planned(batch())
    left.sum().backward(retain_graph=True)
    if holds:
        right.sum().backward()
    else:
        with pytest.raises(BackwardError, match="an input of the model is gone"):
            right.sum().backward()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda module, x: module.enter.weight.detach().mul_(2), BackwardError),
        (lambda module, x: x.add_(1), BackwardError),
        (lambda module, x: module.trunk[0].bias.data.mul_(2), MemoryChanged),
        (lambda module, x: x.numpy().fill(2), MemoryChanged),
    ],
)
def test_what_changed_meanwhile_is_seen(change, error):
    x = batch()
    planned = Planned(made(), x)
    left, right = planned(x)
    left.sum().backward(retain_graph=True)
    change(planned.module, x)
    with pytest.raises(error):
        right.sum().backward()


def test_gradients_that_are_held_count():
    x = batch()
    planned = Planned(made(), x)
    budget = planned.executable.peak_bytes + 64
    planned.executable.budget_bytes = budget
    given = sum(parameter.nbytes for parameter in planned.parameters())
    for planned_bytes, fits in ((0, False), (given, True)):
        planned.options = {"repeats": Repeats(planned_bytes)}
        planned.zero_grad()
        left, right = planned(x)
        (left.sum() + right.sum()).backward(retain_graph=True)
        if fits:
            planned.executable.budget_bytes = budget + given  # the forward has them, too
            (left.sum() + right.sum()).backward()
        else:
            with pytest.raises(BudgetExceeded, match=f"{given:,} are held"):
                (left.sum() + right.sum()).backward()


def test_outputs_that_are_gone_are_so_in_each_backward():
    x, seen = batch(), []
    planned = Planned(made(), x)
    planned.options = {"started": lambda _, released: seen.append(released)}
    left, right = (output.sum() for output in planned(x))
    left.backward(retain_graph=True)
    right.backward()
    assert seen == [frozenset({0, 1})] * 2


def test_what_others_drew_during_the_forward_is_seen():
    x = batch()
    planned = Planned(made(), x)
    code = planned.executable.code
    forward = code.forward

    def disturbed(inputs, states):
        torch.rand(1)  # as another thread would
        return forward(inputs, states)

    vars(code)["_functions"] = (disturbed, code.backward)
    left, right = planned(x)
    vars(code)["_functions"] = (forward, code.backward)
    left.sum().backward(retain_graph=True)
    with pytest.raises(BackwardError, match="another thread drew"):
        right.sum().backward()
