"""A plan that took more than was predicted is made again, for less: of its own program alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.planning import planner, solving
from remat_graph import Graph


class Gated(nn.Module):
    """Layers whose insides can be in slices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 256) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(256, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.silu(up(x)))
        return x.square().mean()


@pytest.mark.sweep
def test_only_the_program_that_was_fastest_is_solved_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others are no faster within less than they were."""
    solved: list[Counter[tuple[str, ...]]] = [Counter()]
    solve, rehearse = solving.solve, planner._rehearsed_plan

    def counted(graph: Graph, *args: Any, **options: Any) -> Any:
        solved[-1][tuple(op.name for op in graph.ops)] += 1
        return solve(graph, *args, **options)

    def over(*args: Any) -> Any:
        planned, needed, _ = rehearse(*args)
        is_first = len(solved) == 1
        solved.append(Counter())
        return planned, needed, 4096 if is_first else 0

    monkeypatch.setattr(solving, "solve", counted)
    monkeypatch.setattr(planner, "_rehearsed_plan", over)
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    model = remat.rematerialize(Gated(), x, budget=0.4, numerics="rounding", limit_seconds=0.2)
    model(x).backward()
    first, second = solved[:2]
    assert len(first) > 1
    assert len(second) == 1
    assert model.plan.kinds[0].sliced
