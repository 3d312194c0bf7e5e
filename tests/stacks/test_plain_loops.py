"""Loops written by hand: accumulation, averages, scaling, copies, steps within the backward."""

import copy
import io
import pickle

import pytest
import torch
from exec_cases.training import assert_bitwise_equal
from integration_cases.sweeps import swept
from stack_cases.models import (
    Watched,
    assert_planned,
    assert_same_gradients,
    assert_same_state,
    assert_same_tensors,
    record,
    rematerialized,
)

import remat
from loop_cases import by_hand
from loop_cases.models import Blocks, batch, made, square
from loop_cases.run import Run


def pair():
    return rematerialized(made(Blocks)), made(Blocks)


NAMES = [
    "AdamW, schedule, clipping",
    "gradient accumulation",
    "two optimizers",
    "averages of the weights",
    "a smaller last batch, its loss handed over",
    "hooks of inner modules",
]


@pytest.mark.parametrize("name", swept(NAMES, ["two optimizers", "averages of the weights"]))
def test_what_a_loop_leaves_behind_is_that_of_the_plain_model(name):
    watched = Watched(by_hand.LOOPS[name])
    assert_same_tensors(watched.got, watched.expected)
    for model in watched.models:
        assert_planned(model)


def train_in_pairs(model):
    torch.manual_seed(1)
    for step in range(0, 12, 2):
        first, second = model(batch(step)), model(batch(step + 1))
        (square(first) + square(second)).backward()


@pytest.mark.sweep
def test_two_forwards_before_their_backwards():
    """Told of in the first step; both have one budget from then on."""
    model, eager = rematerialized(made(Blocks), budget=0.85), made(Blocks)
    with pytest.warns(remat.BudgetWarning, match="2 calls were made before a backward") as told:
        train_in_pairs(model)
    train_in_pairs(eager)
    assert len(told) == 1
    assert len(model.plan.calls) == 2
    assert_planned(model)
    assert_same_gradients(model, eager)


def test_scaled_losses():
    """One scale is too large, and its step is left out."""
    watched = Watched(by_hand.scaled, steps=3)
    assert_same_tensors(watched.got, watched.expected)
    assert watched.expected["scale"] == 2.0**27
    assert_planned(watched.models[0])


@pytest.mark.sweep
def test_a_checkpoint_in_the_middle():
    model, eager = pair()
    for each in (model, eager):
        record(each)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = rematerialized(made(Blocks))
    other.load_state_dict(torch.load(file))
    assert_bitwise_equal(record(other), record(eager))
    assert_planned(other)


@pytest.mark.parametrize("planned", [True, pytest.param(False, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "duplicate",
    [
        pytest.param(copy.deepcopy, marks=pytest.mark.sweep),
        lambda model: pickle.loads(pickle.dumps(model)),
    ],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_trains_by_itself(duplicate, planned):
    model, eager = pair()
    if planned:
        record(model)
        record(eager)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = duplicate(model)
    assert_bitwise_equal(record(other), record(eager))
    assert_planned(other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.filterwarnings("ignore:a step took:remat.BudgetWarning")  # what hooks allocate
def test_an_optimizer_that_steps_within_the_backward():
    model, eager = pair()
    for each in (model, eager):
        stepped = []
        for parameter in each.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.01)

            def step_now(parameter, optimizer=optimizer, stepped=stepped):
                optimizer.step()
                optimizer.zero_grad()
                stepped.append(parameter)

            parameter.register_post_accumulate_grad_hook(step_now)
        torch.manual_seed(1)
        for step in range(3):
            square(each(batch(step))).backward()
        assert len(stepped) == 3 * len(list(each.parameters()))
        assert all(parameter.grad is None for parameter in each.parameters())
    assert_planned(model)
    assert_same_state(model, eager)


@pytest.mark.sweep
def test_a_loop_whose_batches_are_of_drawn_sizes_leaves_behind_what_the_plain_model_does():
    def wrap(model):
        return remat.rematerialize(model, budget=0.8, limit_seconds=0.1)

    run = Run(wrap, steps=12, draws=True)
    assert len(set(map(run.rows, range(10)))) > 5
    assert [run.rows(10 + step) for step in range(10)] == list(map(run.rows, range(10)))
    plain = Run(steps=12, draws=True)
    assert_same_tensors(by_hand.adamw(run), by_hand.adamw(plain))
