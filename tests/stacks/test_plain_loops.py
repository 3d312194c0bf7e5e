"""Loops written by hand: accumulation, averages, scaling, copies, steps within the backward."""

import copy
import io
import pickle

import pytest
import torch
from exec_cases.training import assert_bitwise_equal
from stack_cases.models import (
    Blocks,
    assert_planned,
    assert_same_gradients,
    assert_same_state,
    batch,
    made,
    record,
    rematerialized,
    square,
)


def pair():
    return rematerialized(made(Blocks)), made(Blocks)


def test_accumulated_gradients():
    model, eager = pair()
    for each in (model, eager):
        torch.manual_seed(1)
        for step in range(4):
            (square(each(batch(step))) / 4).backward()
    assert_planned(model)
    assert_same_gradients(model, eager)


def test_two_forwards_before_their_backwards():
    model, eager = pair()
    for each in (model, eager):
        torch.manual_seed(1)
        for step in (0, 2):
            first, second = each(batch(step)), each(batch(step + 1))
            (square(first) + square(second)).backward()
    assert_planned(model)
    assert_same_gradients(model, eager)


def test_adamw_with_a_scheduler_and_clipping():
    model, eager = pair()
    norms = []
    for each in (model, eager):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=4)
        torch.manual_seed(1)
        for step in range(4):
            optimizer.zero_grad()
            square(each(batch(step))).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1))
            optimizer.step()
            scheduler.step()
    assert_planned(model)
    assert_same_state(model, eager)
    assert norms[:4] == norms[4:]


def test_an_average_of_the_weights():
    model, eager = pair()
    averages = []
    for each in (model, eager):
        average = copy.deepcopy(each)
        other = torch.optim.swa_utils.AveragedModel(each)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        torch.manual_seed(1)
        for step in range(3):
            optimizer.zero_grad()
            square(each(batch(step))).backward()
            optimizer.step()
            other.update_parameters(each)
            with torch.no_grad():
                for ours, theirs in zip(average.parameters(), each.parameters(), strict=True):
                    ours.lerp_(theirs, 0.1)
        averages += [(average, other.module, average.eval()(batch(9)))]
    assert_planned(model)
    assert_same_state(model, eager)
    for ours, theirs in zip(averages[0][:2], averages[1][:2], strict=True):
        assert_same_state(ours, theirs)
    assert torch.equal(averages[0][2], averages[1][2])


def test_scaled_losses():
    """One scale is too large, and its step is left out."""
    model, eager = pair()
    scales = []
    for each in (model, eager):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
        torch.manual_seed(1)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(square(each(batch(step))) * 8).backward()
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] == 2.0**27
    assert_planned(model)
    assert_same_state(model, eager)


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


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
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
