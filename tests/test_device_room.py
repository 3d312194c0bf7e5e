"""A device with less room than a plan takes, or with blocks larger than what is in them."""

import copy
import dataclasses
import weakref

import pytest
import torch
from torch import nn

import remat
from remat_exec import Executable


def test_a_device_with_less_memory_than_the_budget_says_so(monkeypatch):
    def rehearse(*_):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB\nmore about it")

    monkeypatch.setattr(Executable, "rehearse", rehearse)
    with pytest.raises(remat.BudgetExceeded, match=r"ran out .* \(tried to allocate 2 GiB\)"):
        remat.rematerialize(nn.Linear(4, 4), torch.randn(2, 4), budget="1GiB")


def test_a_plan_whose_blocks_take_more_than_its_budget_is_made_again_with_room_for_them(
    monkeypatch,
):
    """As CUDA's allocator hands out larger blocks, other ones for each plan."""
    rehearse, targets = Executable.rehearse, []

    def in_larger_blocks(self, *rest):
        found = rehearse(self, *rest)
        targets.append(self.peak_bytes)
        return dataclasses.replace(found, peak_bytes=found.peak_bytes + 2**12 + 2**9 * len(targets))

    layers = [nn.Linear(8, 8), *(nn.Tanh() for _ in range(60))]
    model, x = nn.Sequential(*layers), torch.randn(16, 8)
    tight = remat.rematerialize(copy.deepcopy(model), x, budget=0.5).plan
    monkeypatch.setattr(Executable, "rehearse", in_larger_blocks)
    budget = tight.measured_peak_bytes + 2**12 + 2**8
    plan = remat.rematerialize(model, x, budget=budget).plan
    assert len(targets) > 1
    assert plan.measured_peak_bytes <= budget


@pytest.fixture
def in_larger_blocks(monkeypatch):
    """Let 1 KiB of every measured peak be what blocks took beyond; give the predicted peaks."""
    rehearse, predicted = Executable.rehearse, []

    def rehearsed(self, *rest):
        found = rehearse(self, *rest)
        predicted.append(self.peak_bytes)
        return dataclasses.replace(found, requested_bytes=found.peak_bytes - 2**10)

    monkeypatch.setattr(Executable, "rehearse", rehearsed)
    return predicted


def a_plan_of_a_chain(budget, layers=60):
    layers = [nn.Linear(8, 8), *(nn.Tanh() for _ in range(layers))]
    return remat.rematerialize(
        nn.Sequential(*layers), torch.randn(16, 8), budget=budget, loss=torch.sum
    ).plan


def test_room_is_left_for_the_blocks_of_later_steps(in_larger_blocks):
    plan = a_plan_of_a_chain(16_000)
    assert len(in_larger_blocks) == 2  # the first left less
    assert plan.measured_peak_bytes <= plan.budget_bytes - 2**8


@pytest.mark.sweep
def test_where_there_is_no_room_for_other_blocks_what_was_within_the_budget_is_taken(
    in_larger_blocks,
):
    with pytest.raises(remat.BudgetTooSmall) as refused:
        a_plan_of_a_chain(100, layers=12)
    least = refused.value.smallest_bytes
    plan = a_plan_of_a_chain(least, layers=12)
    assert len(in_larger_blocks) == 1
    assert least - 2**8 < plan.measured_peak_bytes <= least


def test_a_step_that_ran_out_of_memory_holds_none_of_it_while_its_error_is_handled(monkeypatch):
    held = []

    def fail(_, handed, *__):
        held.extend(map(weakref.ref, handed))
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr("remat_exec.rehearsal._gradients_of_handed", fail)
    with pytest.raises(remat.BudgetExceeded) as caught:
        remat.rematerialize(nn.Linear(4, 4), torch.randn(2, 4), budget="1GiB")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert held
    assert not any(made() is not None for made in held)
