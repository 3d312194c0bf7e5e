"""A number that changes at each step, in a model that runs compiled groups."""

from __future__ import annotations

import copy

import pytest
import torch
from integration_cases.kernels import compiled_here
from torch import nn

import remat
from remat_graph.torch.fusing import compiling

_STEPS = 7


class Warmed(nn.Module):
    """Scales by a tenth of its counter, in one region or after a break."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
        self.breaks, self.count = breaks, 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.breaks:
            torch._dynamo.graph_break()
        hidden = torch.tanh(hidden) * (self.count * 0.1) * hidden
        self.count += 1
        return self.down(hidden.square() + hidden).square().mean()


@pytest.mark.sweep
@pytest.mark.parametrize("breaks", [True, False])
def test_groups_are_not_compiled_for_each_number(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    """The first are of the number that was traced; then those without it serve all others."""
    compiled: list[str] = []
    compile_ = compiling._compiled

    def counted(kernel: compiling.Kernel) -> object:
        compiled.append(kernel.key)
        return compile_(kernel)

    monkeypatch.setattr(compiling, "_compiled", counted)
    torch.manual_seed(0)
    eager = Warmed(breaks=breaks).double()
    with compiled_here():
        run = remat.rematerialize(
            copy.deepcopy(eager), budget="1MiB", kernels="inductor", wait=True,
            costs="estimate", limit_seconds=0.1,
        )  # fmt: skip
        known = 0
        for step in range(_STEPS):
            x = torch.randn(5, 6, dtype=torch.double)
            for model in (eager, run):
                model.zero_grad()
                model(x).backward()
            for one, two in zip(run.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-12)
            known = len(set(compiled)) if step == 3 else known
    assert len(set(compiled)) == known > 0
