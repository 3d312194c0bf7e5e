"""Forwards that are run again in one step, since they ask for a gradient across a break."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integration_cases.one_step import steps
from torch import Tensor, nn

import remat
from remat_exec import BackwardError, PartialGradientAsked, measure_peak

WIDTH = 16


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Asking(nn.Module):
    """Asks twice, each time across a break, for the gradient of what no input is.

    `added` has a gradient by `backward()` in the forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (layer() for _ in range(4))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.added = nn.Parameter(torch.ones(WIDTH))
        self.adds, self.asks_from, self.calls = False, 0, 0
        self.error: Exception | None = None

    def slope(self, y: Tensor, x: Tensor) -> Tensor | int:
        if not torch.is_grad_enabled() or self.calls <= self.asks_from:
            return 0
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0].square().mean()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.adds and torch.is_grad_enabled():
            (3 * self.added).sum().backward()
        x = self.norm(self.first(x)).tanh().clone()
        y = self.drop(self.second(x).tanh())
        torch._dynamo.graph_break()
        if self.error is not None:
            raise self.error
        loss = self.slope(y, x)
        x = self.third(y).tanh().clone()
        y = self.drop(self.fourth(x).tanh())
        torch._dynamo.graph_break()
        return loss + self.slope(y, x) + (y * self.added).square().mean()


def asking(**options: Any) -> tuple[Asking, Asking]:
    torch.manual_seed(0)
    eager = Asking()
    vars(eager).update(options)
    return eager, remat.rematerialize(copy.deepcopy(eager), budget=1.0, limit_seconds=0.1)


@pytest.mark.parametrize("adds", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_a_forward_that_asks_for_gradients_of_what_it_made_trains_from_its_first_step_on(
    adds: bool,
) -> None:
    eager, run = asking(adds=adds)
    for rows in ((32, 32), (24, 48)):
        for one, other in zip(steps(eager, rows, WIDTH), steps(run, rows, WIDTH), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert eager.calls == run.calls
        torch.testing.assert_close(dict(eager.named_buffers()), dict(run.named_buffers()))
        with torch.no_grad():
            assert torch.equal(*(each.eval()(torch.ones(8, WIDTH)) for each in (eager, run)))
        eager.train(), run.train()


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:the forward was run again")
def test_so_does_one_that_begins_to_ask_later() -> None:
    eager, run = asking(asks_from=3)
    plain, planned = (steps(each, (32,) * 6, WIDTH) for each in (eager, run))
    for (loss, grads, _), (other, others, _) in zip(plain, planned, strict=True):
        torch.testing.assert_close((loss, grads), (other, others), rtol=0, atol=0)


def test_what_a_forward_held_before_it_was_run_again_is_no_part_of_plains_step() -> None:
    eager, run = asking()
    x = torch.randn(512, WIDTH)
    for _ in range(5):
        run.zero_grad()
        with measure_peak() as peak:
            run(x).backward()
    with measure_peak() as plain:
        eager(x).backward()
    assert run.plan.budget_bytes <= 1.05 * plain.peak_bytes
    assert peak.peak_bytes <= run.plan.budget_bytes


def test_gradients_that_are_there_are_not_added_to_twice() -> None:
    run = asking(adds=True)[1]
    run.added.grad = torch.ones(WIDTH)
    with pytest.raises(remat.RematError, match="zero_grad"):
        run(torch.randn(8, WIDTH))


@pytest.mark.parametrize("kind", [BackwardError, PartialGradientAsked])
def test_an_error_that_no_cut_mends_comes_out_at_once(kind: type[BackwardError]) -> None:
    run = asking(error=kind("of another model"))[1]
    with pytest.raises(kind, match="of another model"):
        run(torch.randn(8, WIDTH))
    assert run.calls == 1
