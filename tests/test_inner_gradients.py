"""Gradients that a forward computes by `torch.autograd.grad`, and that are trained through."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint
from integration_cases.inner_gradients import (
    Backward,
    Balanced,
    Batch,
    Custom,
    Equilibrium,
    Forces,
    ForcesGiven,
    InnerSteps,
    Penalty,
    Physics,
    Saliency,
    Switching,
    layers,
)
from torch import Tensor, nn
from torch.autograd import grad

import remat
from remat_exec import measure_peak

PLANNED = (ForcesGiven, Physics, Equilibrium, Custom)
MORE = (Forces, Penalty, InnerSteps, Balanced, Saliency)


def batches_of(model: nn.Module, count: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [model.batch(draw) for _ in range(count)]


def step(model: nn.Module, batch: Batch) -> list[Tensor | None]:
    """Run a step on a copy of a batch; give its loss, gradients, buffers and generator after it."""
    batch = tuple(each.detach().requires_grad_(each.requires_grad) for each in batch)
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(*batch)
    loss.backward()
    slopes = [each.grad for each in (*model.parameters(), *batch)]
    return [loss.detach(), *slopes, *map(torch.clone, model.buffers()), torch.get_rng_state()]


def peak_of(model: nn.Module, batch: Batch) -> int:
    with measure_peak() as peak:
        step(copy.deepcopy(model), batch)
    return peak.peak_bytes


def assert_as_plain(model: nn.Module, planned: nn.Module, batches: list[Batch]) -> list[int]:
    """Compare every bit of some steps; give their peaks."""
    peaks = []
    for batch in batches:
        with measure_peak() as peak:
            found = step(planned, batch)
        for mine, plain in zip(found, step(model, batch), strict=True):
            assert (mine is None) == (plain is None)
            assert mine is None or torch.equal(mine, plain)
        peaks.append(peak.peak_bytes)
    return peaks


def assert_planned(model: nn.Module) -> None:
    """Train a model at 0.7 of plain's peak, and compare it with a copy in eager."""
    batches = batches_of(model, 3)
    budget = int(0.7 * peak_of(model, batches[0]))
    planned = remat.rematerialize(copy.deepcopy(model), budget=budget, limit_seconds=0.2)
    assert max(assert_as_plain(model, planned, batches)) <= budget
    assert len(planned.plan.regions) == 1


@pytest.mark.parametrize("kind", PLANNED)
def test_a_gradient_in_the_forward_is_planned_as_a_part_of_it(kind):
    torch.manual_seed(0)
    assert_planned(kind())


@pytest.mark.sweep
@pytest.mark.parametrize("kind", MORE)
def test_other_gradients_in_the_forward_are(kind):
    torch.manual_seed(0)
    assert_planned(kind())


@pytest.mark.sweep
def test_a_gradient_through_twelve_layers_that_do_the_same_is_traced_through_all():
    torch.manual_seed(0)
    assert_planned(Forces(between=12))


@pytest.mark.parametrize("kind", [Backward, lambda: Custom(is_broken=True)])
def test_what_breaks_the_graph_is_right(kind):
    torch.manual_seed(0)
    model = kind()
    planned = remat.rematerialize(copy.deepcopy(model), budget="1GiB", limit_seconds=0.1)
    assert_as_plain(model, planned, batches_of(model, 3))


def test_a_loss_that_is_told_is_measured_on_what_such_a_forward_gives():
    torch.manual_seed(0)
    model = Forces()
    batches = batches_of(model, 2)
    planned = remat.rematerialize(
        copy.deepcopy(model), batches[0], budget="1GiB", limit_seconds=0.1, loss=lambda loss: loss
    )
    assert_as_plain(model, planned, batches)


def test_backward_in_the_forward_calls_the_hooks_of_parameters():
    torch.manual_seed(0)
    model, calls = Backward(), []
    planned = remat.rematerialize(copy.deepcopy(model), budget="1GiB", limit_seconds=0.1)
    for each in (model, planned):
        first = next(each.inner.parameters())
        first.register_post_accumulate_grad_hook(lambda found: calls.append(found.grad.clone()))
    for batch in batches_of(model, 2):
        assert_as_plain(model, planned, [batch])
    mine, plain = calls[0:2] + calls[4:6], calls[2:4] + calls[6:8]
    assert len(calls) == 8
    assert all(map(torch.equal, mine, plain))


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_function_whose_backward_is_partly_without_gradients_is_refused(is_broken):
    model = Custom(is_broken, Switching)
    planned = remat.rematerialize(model, budget="1GiB", limit_seconds=0.1)
    with pytest.raises(remat.RematError, match="create_graph=True"):
        step(planned, batches_of(model, 1)[0])


class Related(nn.Module):
    """A slope by what it is given, of which the caller may have made the rest of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        energy = self.layers(torch.cat([x, y], 1)).sum()
        slopes = grad(energy, [x, y], create_graph=True)
        loss: Tensor = energy + slopes[0].square().sum() + slopes[1].square().sum()
        return loss


def by_twice(x: Tensor) -> Tensor:
    return x * 2


def by_a_view(x: Tensor) -> Tensor:
    return x.view(2, -1).view_as(x)


def by_itself(x: Tensor) -> Tensor:
    return (x.detach() * 2).requires_grad_()


MADE = {"twice": (by_twice, 0), "a view": (by_a_view, 0), "alone": (by_itself, 2)}


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")
@pytest.mark.parametrize(("make", "alike"), MADE.values(), ids=MADE)
def test_inputs_of_which_one_was_made_of_the_other(make, alike):
    """Autograd goes on from the one to the other, outside of the forward."""
    torch.manual_seed(0)
    model = Related()
    planned = remat.rematerialize(
        copy.deepcopy(model), budget="1GiB", limit_seconds=0.1, on_infeasible="plain"
    )
    refusing = remat.rematerialize(copy.deepcopy(model), budget="1GiB", limit_seconds=0.1)
    found = []
    for each in (model, planned):
        leaf = torch.linspace(-1, 1, 300).view(100, 3).requires_grad_()
        loss = each(leaf, make(leaf))
        loss.backward()
        found.append([loss.detach(), leaf.grad, *(own.grad for own in each.parameters())])
    assert all(map(torch.equal, *found))
    leaf = torch.linspace(-1, 1, 300).view(100, 3).requires_grad_()
    if alike:
        refusing(leaf, make(leaf)).backward()
    else:
        with pytest.raises(remat.RematError, match="gradient of x, of which another"):
            refusing(leaf, make(leaf))


class Checkpointed(Balanced):
    """One whose second loss is weighed in a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.layers(x))

        def weighed(y: Tensor) -> Tensor:
            loss = self.last(y.repeat(1, 2)).square().mean()
            (slope,) = grad(loss, self.last.weight, create_graph=True)
            weighed: Tensor = loss + slope.square().sum()
            return weighed

        loss: Tensor = torch.utils.checkpoint.checkpoint(weighed, y, use_reentrant=False)
        return loss


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")
@pytest.mark.parametrize("kind", [Balanced, Checkpointed])
def test_a_hook_on_what_the_gradient_is_of_is_called_or_refused_while_it_is_there(kind):
    torch.manual_seed(0)
    model = kind()
    refusing, plain = (
        remat.rematerialize(
            copy.deepcopy(model), budget="1GiB", limit_seconds=0.1, on_infeasible=infeasible
        )
        for infeasible in ("raise", "plain")
    )
    hooks = list[torch.utils.hooks.RemovableHandle]()
    for at, batch in enumerate(batches_of(model, 3)):
        if at == 1:
            for each in (model, refusing, plain):
                hooks.append(each.last.weight.register_hook(lambda slope: slope * 0.5))
        if at == 2:
            for hook in hooks:
                hook.remove()
        if at == 1:
            with pytest.raises(remat.RematError, match=r"gradient of last\.weight, which has a"):
                step(refusing, batch)
        else:
            assert_as_plain(model, refusing, [batch])
        assert_as_plain(model, plain, [batch])


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")
def test_a_gradient_that_an_input_retains_is_all_of_it():
    torch.manual_seed(0)
    model = ForcesGiven()
    planned = remat.rematerialize(
        copy.deepcopy(model), budget="1GiB", limit_seconds=0.1, on_infeasible="plain"
    )
    found = []
    for each in (model, planned):
        given = torch.linspace(-1, 1, 300).view(100, 3).requires_grad_() * 2
        given.retain_grad()
        each(given).backward()
        found.append(given.grad)
    assert torch.equal(*found)
