"""Gradients that leave at once: hooks that step an optimizer in the backward, and drop `.grad`."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from remat_exec import BudgetExceeded, Executable, measure_peak
from remat_graph import (
    Compute,
    InvalidSchedule,
    Schedule,
    leave_late,
    leaves,
    reads_after_leaving,
    simulate,
)
from remat_graph.torch import capture
from remat_solvers import smallest_budget, solve, store_all

WIDTH = 256


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Twice(Chain):
    def forward(self, x):
        return super().forward(super().forward(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, WIDTH)
        self.inner = Chain()

    def forward(self, x):
        h = self.inner(self.words(x.abs().sum(1).long() % 64))
        return torch.nn.functional.linear(h, self.words.weight)


MODELS = [Chain, Twice, Tied]


@functools.cache
def made(model):
    torch.manual_seed(0)
    module = model()
    x = torch.randn(64, WIDTH)
    captured = capture(module, (x,), costs="estimate")
    return module, x, captured.with_leaving_gradients(all_of(captured))


def all_of(captured):
    return frozenset(range(len(captured.program.inputs)))


def step_in_backward(module, optimizer):
    for parameter in module.parameters():
        own = optimizer([parameter], lr=0.01)

        def hook(p, own=own):
            own.step()
            p.grad = None

        parameter.register_post_accumulate_grad_hook(hook)


@functools.cache
def schedules(model):
    """Store everything, and what recomputes more and more."""
    graph = made(model)[2].graph
    stored, least = store_all(graph), smallest_budget(graph, limit_seconds=0.2).schedule
    most, fewest = (simulate(graph, schedule).peak_bytes for schedule in (stored, least))
    half = solve(graph, (most + fewest) // 2, limit_seconds=0.1).schedule
    return [leave_late(graph, schedule) for schedule in (stored, half, least)]


@pytest.mark.parametrize(
    "optimizer", [pytest.param(torch.optim.SGD, marks=pytest.mark.sweep), torch.optim.Adam]
)
@pytest.mark.parametrize("model", MODELS)
def test_steps_within_the_backward_are_those_of_eager(model, optimizer):
    module, x, captured = made(model)
    again = 0
    for schedule in schedules(model):
        again += len({*schedule.steps}) < len(schedule.steps)
        executable = Executable(captured, schedule)
        eager, planned = copy.deepcopy(module), copy.deepcopy(module)
        for each in (eager, planned):
            step_in_backward(each, optimizer)
        for _ in range(3):
            eager(x).square().sum().backward()
            (output,) = executable(planned, [x])
            output.square().sum().backward()
        for expected, given in zip(eager.parameters(), planned.parameters(), strict=True):
            assert given.grad is None
            assert torch.equal(expected, given)
    assert again


@pytest.mark.parametrize("model", MODELS)
def test_gradients_count_until_they_leave(model):
    module, x, captured = made(model)
    for schedule in schedules(model):
        executable = Executable(captured, schedule)
        assert executable.rehearse(module, [x]).peak_bytes <= executable.peak_bytes
        planned = copy.deepcopy(module)
        step_in_backward(planned, torch.optim.SGD)
        with measure_peak() as peak:
            (output,) = executable(planned, [x])
            output.square().sum().backward()
        assert peak.peak_bytes <= executable.peak_bytes + 64
    kept = sum(parameter.nbytes for parameter in module.parameters())
    if model is Chain:  # in the others a gradient comes early, and is added to late
        assert executable.peak_bytes < kept < executable.code.staying_peak_bytes


def test_a_parameter_is_not_read_after_its_gradient_has_left():
    _, _, captured = made(Chain)
    graph = captured.graph
    steps = list(store_all(graph).steps)
    first = next(op for op in graph.ops if not leaves(op.name))
    reader = next(op for op in graph.ops if graph.resident.intersection(op.inputs))
    at = next(
        at
        for at, step in enumerate(steps)
        if isinstance(step, Compute)
        and leaves(step.op)
        and set(graph.ops[graph.op_index[step.op]].inputs).intersection(reader.inputs)
    )
    assert first.replayable
    late = Schedule((*steps[: at + 1], Compute(reader.name), *steps[at + 1 :]))
    simulate(graph, late)
    assert reads_after_leaving(graph, late) is not None
    with pytest.raises(InvalidSchedule, match="has left"):
        Executable(captured, late)
    moved = leave_late(graph, late)
    assert reads_after_leaving(graph, moved) is None
    simulate(graph, moved)
    Executable(captured, moved)


def test_nothing_moves_where_nothing_is_read_late():
    graph = made(Chain)[2].graph
    schedule = store_all(graph)
    assert leave_late(graph, schedule) is schedule


@pytest.mark.parametrize("asks", ["grad", "no hooks"])
def test_gradients_that_stay_after_all_are_held_against_the_budget(asks):
    module, x, captured = made(Chain)
    module = copy.deepcopy(module)
    schedule = store_all(captured.graph)
    tight = Executable(captured, schedule, budget_bytes=Executable(captured, schedule).peak_bytes)
    roomy = Executable(captured, schedule, budget_bytes=tight.code.staying_peak_bytes)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    if asks == "grad":
        step_in_backward(module, torch.optim.SGD)
    for executable in (roomy, tight):
        (output,) = executable(module, [x])
        loss = output.square().sum()
        if executable is tight:
            with pytest.raises(BudgetExceeded, match="gradients stay"):
                gradients_of(loss, module, asks)
            return
        given = gradients_of(loss, module, asks)
        assert all(map(torch.equal, expected, given))


def gradients_of(loss, module, asks):
    if asks == "grad":
        return torch.autograd.grad(loss, list(module.parameters()))
    loss.backward()
    return [parameter.grad for parameter in module.parameters()]


def test_only_some_gradients_leave():
    module, x, captured = made(Chain)
    some = captured.with_leaving_gradients(frozenset(range(4)))
    module = copy.deepcopy(module)
    assert some.leaving_gradients < captured.leaving_gradients
    eager = copy.deepcopy(module)
    names = [item.key for item in some.program.inputs if item.variable in some.program.leaving]
    for each in (eager, module):
        for name in names:
            each.get_parameter(name).register_post_accumulate_grad_hook(drop)
    executable = Executable(some, store_all(some.graph))
    (output,) = executable(module, [x])
    output.square().sum().backward()
    eager(x).square().sum().backward()
    for expected, given in zip(eager.parameters(), module.parameters(), strict=True):
        assert (expected.grad is None) == (given.grad is None)
        assert expected.grad is None or torch.equal(expected.grad, given.grad)


def drop(parameter):
    parameter.grad = None
