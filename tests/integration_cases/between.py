"""Two regions with code after them, and whether their steps are recorded."""

import warnings

import torch
from torch import nn

import remat
from integration_cases.one_step import peak_of, run


def is_recorded():
    return torch._C._autograd._profiler_enabled()


class Between(nn.Module):
    """Two regions, and code after them that takes memory."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = (
            nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32), nn.Tanh())
            for _ in range(2)
        )
        self.taken = 0

    def forward(self, x):
        x = self.enter(x)
        torch._dynamo.graph_break()
        x = self.leave(x)
        self.take()
        return x.square().mean()

    @torch.compiler.disable
    def take(self):
        torch.empty(self.taken, dtype=torch.uint8)


def told_by(act):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", remat.BudgetWarning)
        act()
    return [str(w.message) for w in found if w.category is remat.BudgetWarning]


def planned_between(budget=None, **options):
    torch.manual_seed(0)
    model = Between()
    budget = budget or int(0.9 * peak_of(model))
    model = remat.rematerialize(model, budget=budget, limit_seconds=0.05, **options)
    run(model)  # captured and recorded; the next step is planned, and recorded, too
    return model, budget
