"""What is collected before a step is recorded, lest that is done in it."""

import gc

import pytest
import torch
from integration_cases.sized import Attention, tokens
from torch import nn

import remat
from remat.planning import planner
from remat.session import recording, region_planner
from remat_graph.torch import collector_at_rest


def test_a_size_that_is_planned_beside_others_leaves_young_garbage_alone(monkeypatch):
    looks = []
    make_plan = planner.make_plan

    def noted(*args, **options):
        looks.append(gc.isenabled())
        return make_plan(*args, **options)

    monkeypatch.setattr(region_planner, "make_plan", noted)
    monkeypatch.setattr(region_planner, "plan_nearby", lambda *_: None)
    model = Attention(0.2, depth=1)
    run = remat.rematerialize(model, budget=2**20, limit_seconds=0.1)
    for length in (8, 12, 16):
        run(*tokens(length)).backward()
    assert looks == [True, True, False]  # 12 is of another graph than 8


@pytest.mark.parametrize("grows_old", [None, 0, 1], ids=["never", "first plan", "second plan"])
def test_all_garbage_is_collected_before_a_step_if_some_of_a_plan_grew_old(grows_old, monkeypatch):
    record = recording.StepRecording(nn.Linear(1, 1).requires_grad_)
    gc.collect()
    with collector_at_rest():
        for plan in range(2):  # of two regions
            with record.paused():
                if plan == grows_old:
                    gc.collect(1)
    collected = []
    monkeypatch.setattr(recording.gc, "collect", lambda generation=2: collected.append(generation))
    for _ in range(2):
        record.start(torch.device("cpu"))
        record.stop()
        with record.paused():
            pass
    assert collected == [1 if grows_old is None else 2, 1]
