"""Numbers that Python draws in a forward: inputs of the graph where they can be, else a break."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import relu

import remat


class Drawing(nn.Module):
    """A layer that is used by numbers drawn in the forward; `own` is a generator of its own."""

    def __init__(self, use: Callable[[Drawing, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.use, self.own = nn.Linear(16, 16), use, random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x).square().sum()


def scaled(model: Drawing, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = relu(model.layer(x)) * random.random() + random.uniform(1, 2)
    return x


def counted(model: Drawing, x: torch.Tensor) -> torch.Tensor:
    return relu(model.layer(x)) * random.randint(1, 9) + random.randrange(9)


def branched(model: Drawing, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        y = model.layer(x)
        x = relu(y) if random.random() < 0.5 else y
    return x


def cropped(model: Drawing, x: torch.Tensor) -> torch.Tensor:
    first = random.randint(0, 8)
    return relu(model.layer(x[:, first:] @ model.layer.weight[first:]))


def of_its_own(model: Drawing, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = relu(model.layer(x)) * model.own.random()
    return x


@pytest.mark.parametrize("use", [scaled, counted, branched, cropped, of_its_own])
def test_gradients_and_the_generator_are_eagers(
    use: Callable[[Drawing, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    model = Drawing(use)
    eager = Drawing(use)
    eager.load_state_dict(model.state_dict())
    run = remat.rematerialize(model, budget=2**20)
    for step in range(8):
        x, found = torch.randn(8, 16), []
        for module, each in ((eager, eager), (run, model)):
            random.seed(step)
            each.zero_grad()
            module(x).backward()
            found.append(([p.grad for p in each.parameters()], random.getstate()))
        assert all(map(torch.equal, found[0][0], found[1][0])), step
        assert found[0][1] == found[1][1]
        assert model.own.getstate() == eager.own.getstate()


@pytest.mark.parametrize(
    "use",
    [
        lambda model, x: model.layer(x) * ((x > 0) * random.random()),
        lambda model, x: model.layer(x).square().mean() * random.uniform(1, 2),
        lambda model, x: model.layer(x) * torch.where(x > 0, random.random(), 0.0),
        lambda model, x: random.random() ** model.layer(x).abs(),
    ],
    ids=["mask", "scalar", "where", "base"],
)
def test_what_is_drawn_is_a_number_where_types_or_bits_depend(
    use: Callable[[Drawing, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    model = Drawing(use)
    run = remat.rematerialize(model, budget=2**20)
    for step in range(3):
        x, found = torch.randn(8, 16), []
        for module in (model, run):
            random.seed(step)
            model.zero_grad()
            y = module(x)
            y.backward()
            found.append((y.detach(), [p.grad for p in model.parameters()]))
        (eager, wanted), (y, gradients) = found
        assert y.dtype == eager.dtype
        assert torch.equal(y, eager)
        assert all(map(torch.equal, gradients, wanted)), step


@pytest.mark.parametrize("use", [scaled, counted])
def test_numbers_that_are_only_counted_with_break_no_graph(
    use: Callable[[Drawing, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    model = Drawing(use)
    run = remat.rematerialize(model, budget=2**20)
    plans = []
    for _ in range(5):
        run(torch.randn(8, 16)).backward()
        plans.append(run.plan)
    assert plans[0].is_one_region
    assert all(plan is plans[0] for plan in plans)
