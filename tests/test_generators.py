"""Random numbers of Python and NumPy, where a forward that draws them is run once more."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import remat


class Drawing(nn.Module):
    """A slope of a layer that breaks the graph, scaled by numbers that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(x * float(np.random.geometric(0.3))).tanh().sum() * random.random()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(x), x, create_graph=True)
        return slope.square().mean()


def drawn(model: nn.Module, run: nn.Module) -> list[torch.Tensor]:
    seen = []
    for at in range(3):
        model.zero_grad()
        loss = run(torch.full((4, 8), 0.1 * (at + 1)))
        loss.backward()
        seen += [loss.detach(), copy.deepcopy(model.first.weight.grad)]
    return [*seen, torch.tensor(random.random()), torch.tensor(np.random.rand())]


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")
def test_a_forward_that_is_run_again_draws_the_same() -> None:
    seed()
    model = Drawing()
    run = remat.rematerialize(copy.deepcopy(model), budget=2**24, on_infeasible="plain")
    seed()
    expected = drawn(model, model)
    seed()
    torch.testing.assert_close(drawn(run, run), expected, rtol=0, atol=0)
