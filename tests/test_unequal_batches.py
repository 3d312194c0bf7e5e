"""Micro-batches of other sizes, whose gradients add up."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
from integration_cases.unequal import Words, batch

import remat
from remat_exec import measure_peak


@pytest.mark.sweep
def test_gradients_add_up_over_unequal_micro_batches() -> None:
    torch.manual_seed(0)
    eager = Words()
    model = copy.deepcopy(eager)
    budget = 2**20
    run, draw, over = (
        remat.rematerialize(model, budget=budget, limit_seconds=0.1),
        random.Random(0),
        0,
    )
    for step in range(12):
        eager.zero_grad()
        model.zero_grad()
        for _ in range(3):
            ids = batch(draw)
            eager(ids).backward()
            with measure_peak() as peak, warnings.catch_warnings():
                warnings.simplefilter("error", remat.BudgetWarning)
                run(ids).backward()
            over += peak.peak_bytes > budget
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs), step
    assert not over
