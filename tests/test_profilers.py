"""Profilers and debuggers of the user's, at every moment of steps that are recorded."""

import cProfile
import sys
import tracemalloc

import pytest
import torch
from torch import nn

import remat

ROWS, WIDTH = 256, 32
MOMENTS = ("before", "between", "forward", "within the backward", "backward", "optimizer")


pytestmark = pytest.mark.usefixtures("_no_record_stays")


class Layers(nn.Module):
    """One region, or two; `at` is called at each moment of a step by its name."""

    def __init__(self, regions, at):
        super().__init__()
        torch.manual_seed(0)
        self.regions, self.at = regions, at
        self.enter, self.leave = (
            nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh()
            )
            for _ in range(2)
        )

    def forward(self, x):
        x = self.enter(x)
        if self.regions == 2:
            self.between()
        return self.leave(x)

    @torch.compiler.disable
    def between(self):
        self.at("between")


def batch():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def steps(model, at, count=3):
    """Train; give the gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        at("before")
        optimizer.zero_grad()
        output = model(batch())
        at("forward")
        output.register_hook(lambda _: at("within the backward"))
        output.square().mean().backward()
        at("backward")
        optimizer.step()
        at("optimizer")
    return [parameter.grad for parameter in model.parameters()]


class Guest:
    """Begins at the n-th time that a step is at a moment, and ends at the next moment but one.

    Within a backward it ends at once, and it does not end there else: torch's profiler cannot.
    """

    def __init__(self, begin, end, moment, nth):
        self.begin, self.end, self.moment, self.nth = begin, end, moment, nth
        self.left = 0

    def at(self, moment):
        if self.left:
            self.left -= moment != "within the backward"
            if not self.left:
                self.end()
        elif moment == self.moment:
            self.nth -= 1
            if not self.nth:
                self.begin()
                if moment == "within the backward":
                    torch.ones(3).sin()
                    self.end()
                else:
                    self.left = 2


def train_with(begin, end, moment, nth, regions):
    """Train by a plan beside a guest, and see that it is right."""
    guest = Guest(begin, end, moment, nth)
    plain = Layers(regions, lambda _: None)
    model = Layers(regions, guest.at)
    model.load_state_dict(plain.state_dict())
    model = remat.rematerialize(model, budget=0.95, limit_seconds=0.1)
    found = steps(model, guest.at)
    assert not guest.left
    assert guest.nth <= 0
    for mine, plains in zip(found, steps(plain, lambda _: None), strict=True):
        assert torch.equal(mine, plains)


def names(profiler):
    return {event.name for event in profiler.events()}


@pytest.mark.parametrize(
    ("moment", "regions"),
    [
        pytest.param("before", 2, marks=pytest.mark.sweep),
        pytest.param("forward", 1, marks=pytest.mark.sweep),
        ("within the backward", 2),
        ("backward", 2),
        ("optimizer", 1),
    ],
)
def test_a_profiler_begins_at_any_moment_of_a_recorded_step(moment, regions):
    profiler = torch.profiler.profile(profile_memory=True)
    train_with(profiler.start, profiler.stop, moment, 1, regions)
    expected = {
        "before": "aten::addmm",
        "forward": "autograd::engine::evaluate_function: MeanBackward0",
        "within the backward": "aten::sin",
        "backward": "Optimizer.step#SGD.step",
        "optimizer": "aten::addmm",
    }
    assert expected[moment] in names(profiler)


def stepping():
    """Give what a debugger does at each line of every function, and what ends it."""
    lines = []

    def trace(frame, event, argument):
        lines.append(event)
        return trace

    before = sys.gettrace()
    return lambda: sys.settrace(trace), lambda: sys.settrace(before)


def calling():
    profiler = cProfile.Profile()
    return profiler.enable, profiler.disable


def autograd_s():
    profiler = torch.autograd.profiler.profile()
    return profiler.__enter__, lambda: profiler.__exit__(None, None, None)


def annotating():
    ranges = torch.autograd.profiler.emit_itt()
    return ranges.__enter__, lambda: ranges.__exit__(None, None, None)


def marking():
    mark = torch.profiler.record_function("the user's")
    return mark.__enter__, lambda: mark.__exit__(None, None, None)


GUESTS = {
    "a debugger": stepping,
    "cProfile": calling,
    "tracemalloc": lambda: (tracemalloc.start, tracemalloc.stop),
    "a range": marking,
    "autograd's": autograd_s,
    "ITT": annotating,
}
TORCHS = ("autograd's", "ITT")
# Each guest once, torch's own at more moments.
KEPT = {
    *zip(GUESTS, ("between", "before", "between", "before"), strict=False),
    ("autograd's", "within the backward"),
    ("ITT", "forward"),
}


@pytest.mark.parametrize(
    ("guest", "moment"),
    [
        pytest.param(guest, moment, marks=() if (guest, moment) in KEPT else pytest.mark.sweep)
        for guest in GUESTS
        for moment in MOMENTS[: None if guest in TORCHS else 2]
    ],
)
def test_other_guests_begin_at_any_moment(guest, moment):
    train_with(*GUESTS[guest](), moment, 1, 2)


def test_a_loss_is_measured_beside_a_profiler():
    model = Layers(1, lambda _: None)
    options = {"budget": 0.95, "limit_seconds": 0.1, "loss": lambda output: output.square().mean()}
    with torch.profiler.profile(), torch.autocast("cpu", torch.bfloat16):
        planned = remat.rematerialize(model, **options)
        planned(batch()).square().mean().backward()
    assert planned.plan.measured_peak_bytes <= planned.plan.budget_bytes


def test_what_a_plan_raises_beside_a_profiler_is_raised_in_the_users_thread():
    model = remat.rematerialize(Layers(1, lambda _: None), budget=1000, limit_seconds=0.1)
    with torch.profiler.profile(), pytest.raises(remat.BudgetTooSmall):
        model(batch())


def test_a_run_that_is_profiled_from_its_first_step_on_is_told_that_nothing_is_planned():
    model = remat.rematerialize(Layers(2, lambda _: None), budget=0.95, limit_seconds=0.1)
    with (
        torch.profiler.profile(),
        pytest.warns(remat.BudgetWarning, match="no step can be recorded") as told,
    ):
        steps(model, lambda _: None)
    assert len(told) == 1
    steps(model, lambda _: None, count=5)
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
