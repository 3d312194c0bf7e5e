"""Several losses over one forward, each with a backward of its own, within one budget."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import remat
from remat_exec import measure_peak

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TwoTasks(nn.Module):
    """A trunk with dropout and a norm, and the losses of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.drop = nn.Linear(16, 48), nn.BatchNorm1d(48), nn.Dropout(0.1)
        self.up = nn.ModuleList(nn.Linear(48, 192) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(192, 48) for _ in range(4))
        self.kinds, self.number = nn.Linear(48, 5), nn.Linear(48, 1)

    def forward(self, x: torch.Tensor, kind: torch.Tensor, number: torch.Tensor) -> Batch:
        x = self.norm(self.enter(x))
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(self.drop(gelu(up(x))))
        wrong = (self.number(x)[:, 0] - number).square().mean()
        return cross_entropy(self.kinds(x), kind), wrong, x.mean().detach()


def batches(count: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(200, 16, generator=draw),
            torch.randint(5, (200,), generator=draw),
            torch.randn(200, generator=draw),
        )
        for _ in range(count)
    ]


def in_turn(model: nn.Module, batch: Batch) -> None:
    first, second, _ = model(*batch)
    first.backward(retain_graph=True)
    second.backward()


def projected(model: nn.Module, batch: Batch) -> None:
    """Take the part out of one gradient that goes against the other, as PCGrad does."""
    first, second, _ = model(*batch)
    parameters = list(model.parameters())
    one = torch.autograd.grad(first, parameters, retain_graph=True, allow_unused=True)
    two = torch.autograd.grad(second, parameters, allow_unused=True)
    for parameter, *both in zip(parameters, one, two, strict=True):
        a, b = (torch.zeros_like(parameter) if each is None else each for each in both)
        along = (a * b).sum()
        parameter.grad = a + b - (along < 0) * along / b.square().sum().clamp(min=1e-9) * b


def weighed(model: nn.Module, batch: Batch) -> None:
    """Weigh losses by their gradients at one weight, as GradNorm does."""
    first, second, _ = model(*batch)
    weight = model.up[-1].weight
    (one,) = torch.autograd.grad(first, weight, retain_graph=True)
    (two,) = torch.autograd.grad(second, weight, retain_graph=True)
    (first * two.norm() + second * one.norm()).backward()


@pytest.mark.parametrize("step", [in_turn, projected, weighed])
def test_gradients_are_eagers_and_steps_are_planned_for(
    step: Callable[[nn.Module, Batch], None],
) -> None:
    torch.manual_seed(0)
    original = TwoTasks()
    plain, data = copy.deepcopy(original), batches(5)
    with measure_peak() as peak:
        step(copy.deepcopy(plain), data[0])
    model = remat.rematerialize(original, budget=int(0.75 * peak.peak_bytes), limit_seconds=0.2)
    for at, batch in enumerate(data):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", remat.BudgetWarning)
            for each in (plain, model):
                each.zero_grad()
                torch.manual_seed(at)
                with measure_peak() as peak:
                    step(each, batch)
        assert all("over the same forward" in str(each.message) for each in told)
        assert len(told) <= (at == 0)
        assert told or peak.peak_bytes <= model.plan.budget_bytes
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
        for one, other in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(one, other)


def test_an_input_that_nobody_holds_is_held_from_the_next_forward_on() -> None:
    model = remat.rematerialize(TwoTasks(), budget="1GiB", limit_seconds=0.1)
    (x, *rest), *others = batches(3)
    first, second, _ = model(x * 1, *rest)
    first.backward(retain_graph=True)
    with pytest.raises(remat.BackwardError, match="an input of the model is gone"):
        second.backward()
    for x, *rest in others:
        in_turn(model, (x * 1, *rest))


class Words(nn.Module):
    """Returns a loss, another one beside it, and logits that are larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.trunk = nn.Embedding(500, 32), nn.Linear(32, 32)

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        x = gelu(self.trunk(self.words(words)))
        logits = x @ self.words.weight.T
        loss = cross_entropy(logits.flatten(0, 1), words.flatten())
        return {"loss": loss, "aux_loss": x.square().mean(), "logits": logits}


def test_losses_beside_logits_are_planned_for_before_the_first_backward() -> None:
    model, words = Words(), torch.randint(500, (8, 24))
    with measure_peak() as peak:
        returned = model(words)
        (returned["loss"] + returned["aux_loss"]).backward()
    del returned
    model.zero_grad()
    planned = remat.rematerialize(model, budget=int(0.85 * peak.peak_bytes), limit_seconds=0.2)
    for _ in range(2):
        planned.zero_grad()
        with measure_peak() as peak:
            returned = planned(words)
            (returned["loss"] + returned["aux_loss"]).backward()
        assert peak.peak_bytes <= planned.plan.budget_bytes


class Shared(nn.Module):
    """Returns what its second output is made of, so that both are held in a second backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )
        self.head, self.number = nn.Linear(32, 96), nn.Linear(96, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = x + block(x)
        scores = self.head(x)
        return scores, self.number(scores)


@pytest.mark.parametrize("fits", [True, False])
def test_outputs_that_are_there_twice_are_planned_for(fits: bool) -> None:
    plain, x = Shared(), torch.randn(200, 32)
    model = remat.rematerialize(
        copy.deepcopy(plain), x, budget=600_000 if fits else 520_000, limit_seconds=0.2
    )
    peaks, told = [], []
    for _ in range(3):
        model.zero_grad()
        with warnings.catch_warnings(record=True) as warned, measure_peak(collect=False) as peak:
            warnings.simplefilter("always")
            scores, number = model(x)
            first, second = scores.square().mean(), number.square().mean()
            first.backward(retain_graph=True)
            second.backward()
        del scores, number, first, second
        peaks.append(peak.peak_bytes)
        told.append([str(each.message) for each in warned])
    assert "from the next forward on it is planned for" in told[0][0]
    if fits:
        assert told[1:] == [[], []]
        assert max(peaks[1:]) <= model.plan.budget_bytes
    else:  # room is left for gradients, at least
        assert max(peaks[1:]) < peaks[0]
        assert all("no plan that was found has room" in each for (each,) in told[1:])


class Codebook(nn.Module):
    """Trains its codes in the forward, by a loss that shares nothing with the model's."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.breaks, self.enter, self.leave = breaks, nn.Linear(8, 16), nn.Linear(16, 8)
        self.codes = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.enter(x)
        if self.breaks:
            torch._dynamo.graph_break()
        nearest = self.codes[torch.cdist(z.detach(), self.codes.detach()).argmin(-1)]
        (nearest - z.detach()).square().mean().backward()
        with torch.no_grad():
            self.codes -= 0.1 * self.codes.grad
        self.codes.grad = None
        return self.leave(z + (nearest - z).detach())


def test_a_backward_in_the_forward_is_divided_from_the_rest_by_a_break() -> None:
    x = torch.randn(32, 8)
    refused = remat.rematerialize(Codebook(False), budget="1GiB", limit_seconds=0.1)
    with pytest.raises(remat.BackwardError, match=r"graph_break\(\) divides"):
        refused(x).square().mean().backward()
    model, plain = (
        remat.rematerialize(Codebook(True), budget="1GiB", limit_seconds=0.1),
        Codebook(True),
    )
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


class Equilibrium(nn.Module):
    """Solves for the gradient in a hook; data decide how long it looks for the fixed point."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.cell, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.again = torch.compiler.disable(self.step) if apart else self.step

    def step(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.cell(z) * 0.5 + x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            while (self.step(z, x) - z).norm() > 1e-2:
                z = self.step(z, x)
        z = self.step(z, x)
        start = z.detach().clone().requires_grad_()
        then = self.again(start, x)

        def solve(grad: torch.Tensor) -> torch.Tensor:
            found = grad
            for _ in range(4):
                found = torch.autograd.grad(then, start, found, retain_graph=True)[0] + grad
            return found

        z.register_hook(solve)
        return self.leave(z)


def test_what_a_hook_differentiates_several_times_may_run_as_it_is() -> None:
    x = torch.randn(32, 8)
    refused = remat.rematerialize(Equilibrium(False), budget="1GiB", limit_seconds=0.1)
    with pytest.raises(remat.BackwardError, match=r"torch.compiler.disable .* has that run as it"):
        refused(x).square().mean().backward()
    plain = Equilibrium(True)
    model = remat.rematerialize(Equilibrium(True), budget="1GiB", limit_seconds=0.1)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
