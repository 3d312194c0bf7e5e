"""A solver of one's own: checked, and trained by. As a package: examples/remat-solver-example."""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import remat
from remat_graph import Solution
from remat_solvers.testing import check_solver
from remat_solvers.toolkit import Incumbent, Limit, Problem, Report, Wiring, evict, local_search


@dataclass(frozen=True)
class EvictAndSearch:
    """Evicts what is cheapest to compute again until it fits, then improves that."""

    name = "evict-and-search"
    exact = False
    needs_hierarchy = False
    takes_alternatives = False
    citation = ""  # of no paper

    patience: int = 20

    def can_solve(self, problem: Problem) -> str | None:
        return None if problem.graph.ops else "the graph has no ops"

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        wiring, budget = Wiring.of(problem.graph), problem.budget_bytes
        incumbent = Incumbent(self.name, wiring, budget, limit, report)
        now = evict(wiring, np.arange(wiring.op_count), budget)
        if incumbent.offer(now) and not incumbent.closed():
            until = limit.started + limit.elapsed + limit.left(5.0)
            more = {"seed": 0, "deadline": until, "patience": self.patience}
            incumbent.offer(local_search(wiring, now, budget, **more))
        return incumbent.solution()


def main() -> None:
    print(check_solver(EvictAndSearch, problems=20))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)]
    plain, x = nn.Sequential(*layers), torch.randn(512, 64)
    model = remat.rematerialize(
        copy.deepcopy(plain), x, budget=0.7, solver=EvictAndSearch(patience=50)
    )
    print(model.plan)
    for each in (plain, model):
        each(x).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)
    assert model.plan.solution.solver == "evict-and-search(patience=50)"
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


if __name__ == "__main__":
    main()
