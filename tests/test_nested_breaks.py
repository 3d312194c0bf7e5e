"""Gradients that a forward asks for across a break in what it calls."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from integration_cases.one_step import steps
from integration_cases.sweeps import swept
from torch import Tensor, nn
from torch._dynamo import symbolic_convert

import remat
from remat.dynamo.nested_breaks import ALONE, NESTED
from remat_exec import measure_peak

pytestmark = pytest.mark.skipif(NESTED is ALONE, reason="this torch ends the graphs of callers")
WIDTH = 16


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Broken(nn.Module):
    """A layer behind a break, scaled by what was made of parameters before that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = layer(), layer(), nn.Dropout(0.2)
        self.register_buffer("given", torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.first(self.given).tanh()
        torch._dynamo.graph_break()
        return self.drop(self.second(x * scale).tanh())


class Times:
    """What calls a module by an operator, a property, or where it is made."""

    def __init__(self, inner: nn.Module, x: Tensor, made: bool = False) -> None:
        self.inner, self.x, self.made = inner, x, inner(x) if made else None

    def __mul__(self, x: Tensor) -> Tensor:
        return self.inner(x)

    @property
    def value(self) -> Tensor:
        scale = self.inner.weight.sum()
        torch._dynamo.graph_break()
        return self.x * scale


@contextlib.contextmanager
def counted(model: Caller) -> Iterator[None]:
    model.entered += 1
    try:
        yield
    finally:
        model.entered += 2


class Caller(nn.Module):
    """A model that calls the broken one in `run`, and asks for a gradient of what that gives."""

    run: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.behind = Broken(), layer()
        self.entered = 0

    def method(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.behind(self.run(x)).tanh().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        loss: Tensor = slope.square().mean()
        return loss


def within_autocast(model: Caller, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.inner(x).float()


def within_a_context(model: Caller, x: Tensor) -> Tensor:
    with counted(model):
        return model.inner(x)


def within_try(model: Caller, x: Tensor) -> Tensor:
    try:
        return model.inner(x)
    finally:
        model.entered += 1


def by_a_closure(model: Caller, x: Tensor) -> Tensor:
    calls = 0

    def run(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        x = model.inner(x) * calls
        calls += 1
        return x

    return run(x) * calls


def in_a_loop(model: Caller, x: Tensor) -> Tensor:
    for scale in range(2):
        x = model.inner(x) + scale
    return x


def with_hooks(model: Caller, x: Tensor) -> Tensor:
    handle = model.inner.second.register_full_backward_hook(lambda *_: None)
    try:
        return model.inner(x)
    finally:
        handle.remove()


PLANNED: dict[str, Any] = {
    "a module": lambda model, x: model.inner(x),
    "a method": lambda model, x: model.method(x),
    "a closure": by_a_closure,
    "autocast": within_autocast,
}
OTHERS: dict[str, Any] = {
    "a loop": in_a_loop,
    "a context": within_a_context,
    "try": within_try,
    "hooks": with_hooks,
    "map": lambda model, x: torch.stack(list(map(model.inner, (x, 2 * x)))).mean(0),
    "a loop over map": lambda model, x: sum((each for each in map(model.inner, (x, 2 * x))), x),
    "reduce": lambda model, x: functools.reduce(lambda y, _: model.inner(y), range(2), x),
    "sorted": lambda model, x: x * sorted((1, 2), key=lambda at: model.inner(x).mean() * at)[0],
    "a generator": lambda model, x: sum((model.inner(x * at) for at in (1, 2)), x),
    "a list": lambda model, x: sum([model.inner(x * at) for at in (1, 2)], x),
    "a list of properties": lambda model, x: sum(
        [each.value for each in (Times(model.behind, x), Times(model.behind, x))], x
    ),
    "partial": lambda model, x: functools.partial(model.inner)(x),
    "an operator": lambda model, x: Times(model.inner, x) * x,
    "a constructor": lambda model, x: Times(model.inner, x, made=True).made,
    "vmap": lambda model, x: torch.vmap(model.inner, randomness="same")(x),
}  # fmt: skip


def assert_trained_as_in_eager(call: Any, rows: tuple[int, ...]) -> Any:
    torch.manual_seed(0)
    eager = type("Calling", (Caller,), {"run": call})()  # a method, as TorchDynamo sees it
    model = copy.deepcopy(eager)
    run = remat.rematerialize(model, budget=2**24, limit_seconds=0.1)
    for one, other in zip(steps(eager, rows, WIDTH), steps(run, rows, WIDTH), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    return run


@pytest.mark.parametrize("name", swept(PLANNED, ["a module"]))
def test_a_gradient_across_a_break_in_what_is_called_is_planned(name: str) -> None:
    run = assert_trained_as_in_eager(PLANNED[name], (8, 8, 9))
    regions = re.findall(r"resume_in_\w+, (\d+) .*keeps", str(run.plan))
    assert max(map(int, regions)) > 8


class Telling(Caller):
    """Prints before it calls what breaks."""

    def run(self, x: Tensor) -> Tensor:
        print("before")  # noqa: T201
        return self.inner(x)


def test_what_callers_print_before_a_break_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = Telling()
    run = remat.rematerialize(model, budget=2**24, limit_seconds=0.1)
    for step in range(4):
        capsys.readouterr()
        run(torch.randn(8, WIDTH)).backward()
        told = capsys.readouterr().out.split()
        assert told == ["before"] or step == 0  # which runs the forward again


class Counting(Caller):
    """Counts its steps in Python and in buffers, and draws numbers; `late` asks from step 3 on."""

    steps: Tensor

    def __init__(self, late: bool = False, writes: bool = False) -> None:
        super().__init__()
        self.late, self.writes = late, writes
        self.norm = nn.BatchNorm1d(WIDTH)
        self.seen: list[int] = []
        self.drawn = random.Random(0)
        self.register_buffer("steps", torch.zeros(()))

    def run(self, x: Tensor) -> Tensor:
        self.entered += 1
        self.seen.append(self.entered)
        self.steps += 1
        return self.norm(self.inner(x)) * self.drawn.random() * random.random()

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            x.mul_(2)
        if self.late and self.entered < 3:
            return self.run(x).square().mean()
        return super().forward(x)


def counted_in(model: Counting) -> tuple[Any, ...]:
    return model.entered, model.seen, model.drawn.getstate(), dict(model.named_buffers())


def test_a_forward_that_asks_across_a_break_counts_its_steps_once() -> None:
    random.seed(0)
    torch.manual_seed(0)
    eager = Counting()
    model = copy.deepcopy(eager)
    run = remat.rematerialize(model, budget=2**24, limit_seconds=0.1)
    numbers = random.getstate()
    plain = steps(eager, (8, 8, 6), WIDTH)
    random.setstate(numbers)
    for at, (one, other) in enumerate(zip(plain, steps(run, (8, 8, 6), WIDTH), strict=True)):
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=f"step {at}")
    torch.testing.assert_close(counted_in(eager), counted_in(run), rtol=0, atol=0)


def test_a_forward_that_first_asks_in_a_later_step_says_that_it_ran_twice() -> None:
    model = Counting(late=True)
    run = remat.rematerialize(model, budget=2**24, limit_seconds=0.1)
    for _ in range(3):
        run(torch.randn(8, WIDTH)).backward()
    with pytest.warns(UserWarning, match="counts again in this step"):
        run(torch.randn(8, WIDTH)).backward()


def test_a_forward_that_asks_across_a_break_and_writes_to_its_input_is_refused() -> None:
    run = remat.rematerialize(Counting(writes=True), budget=2**24, limit_seconds=0.1)
    with pytest.raises(remat.RematError, match="change a copy"):
        run(torch.randn(8, WIDTH)).backward()


@pytest.mark.parametrize("name", swept(OTHERS, ["map"]))
@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")
def test_whatever_calls_what_breaks_trains_as_in_eager_or_is_refused(name: str) -> None:
    with contextlib.suppress(remat.RematError):
        assert_trained_as_in_eager(OTHERS[name], (8, 8, 6, 9))


def test_where_torch_fails_to_go_on_the_callers_have_graphs_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Any, *_: Any) -> None:
        raise AssertionError("no such frame")

    inlining = symbolic_convert.InliningInstructionTranslator
    monkeypatch.setattr(inlining, "create_call_resume_at", fail)
    run = assert_trained_as_in_eager(PLANNED["a module"], (8, 8, 6))
    assert "TorchDynamo fails" not in str(run.plan)


class Potential(nn.Module):
    """An energy and its forces, over neighbours that code which no graph has searches.

    Before the search there are values made of parameters or, if `depends`, of the places, too.
    """

    def __init__(self, depends: bool = False) -> None:
        super().__init__()
        self.near, self.out, self.kind = nn.Linear(1, 32), nn.Linear(32, 1), nn.Linear(3, 32)
        self.pairs = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.depends = depends

    def energy(self, places: Tensor) -> Tensor:
        kinds = self.kind(places if self.depends else places.detach()).tanh()
        with torch.no_grad():
            near = torch.cdist(places, places) < 1.5
        first, second = near.nonzero().unbind(1)
        far = (places[first] - places[second]).square().sum(1, keepdim=True)
        pairs = self.near(far) * kinds[first]
        for layer in self.pairs:
            pairs = layer(pairs.tanh())
        energy: Tensor = self.out(pairs).sum()
        return energy

    def forward(self, places: Tensor, forces: Tensor) -> Tensor:
        places = places.detach().requires_grad_()
        (found,) = torch.autograd.grad(self.energy(places), places, create_graph=True)
        loss: Tensor = (found + forces).square().mean()
        return loss


def peaks_of_steps(eager: nn.Module, run: nn.Module) -> Iterator[tuple[int, int]]:
    """Train both, and give the peaks of each step; gradients are the same."""
    for _ in range(5):
        inputs = torch.randn(48, 3), torch.randn(48, 3)
        peaks, grads = [], []
        for each in (eager, run):
            each.zero_grad()
            with measure_peak() as peak:
                each(*inputs).backward()
            peaks.append(peak.peak_bytes)
            grads.append([parameter.grad for parameter in each.parameters()])
        torch.testing.assert_close(*grads, rtol=0, atol=0)
        yield peaks[0], peaks[1]


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")  # of larger sizes
def test_forces_over_neighbours_that_the_forward_searches_are_planned() -> None:
    torch.manual_seed(0)
    eager = Potential()
    run = remat.rematerialize(copy.deepcopy(eager), budget=0.7, limit_seconds=0.1)
    peaks = list(peaks_of_steps(eager, run))
    assert all(ours < 0.85 * plain for plain, ours in peaks[3:])  # 0.7 of the largest step's


def test_forces_through_what_was_made_of_the_places_before_a_break_are_refused() -> None:
    torch.manual_seed(0)
    eager = Potential(depends=True)
    run = remat.rematerialize(copy.deepcopy(eager), budget=2**24)
    with pytest.raises(remat.RematError, match="a value from before a break, of which another"):
        list(peaks_of_steps(eager, run))
