"""What holds on the CPU holds on CUDA: `hatch run test tests/test_gpu.py` with a GPU."""

import copy

import pytest
import torch
from exec_cases.models import Scheduled

import remat
import zoo
from remat_exec import measure_peak
from remat_graph.torch import capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gradients_after(model, example, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=True)
        example.step(model)
        found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return found


@pytest.mark.parametrize("fraction", [1.0, 0.6])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_trains_within_the_budget_with_the_gradients_of_storing_everything(name, fraction):
    example = zoo.build(name).to("cuda")
    stored = copy.deepcopy(example.model)
    captured = capture(stored, example.args, example.kwargs)
    module = Scheduled(stored, captured)
    expected = gradients_after(module, example)

    model = copy.deepcopy(example.model)
    call = (example.args, example.kwargs)
    try:
        small = remat.rematerialize(model, *call, budget=fraction, limit_seconds=5)
    except remat.BudgetTooSmall as error:
        budget = error.smallest_bytes + 2**16
        small = remat.rematerialize(model, *call, budget=budget, limit_seconds=5)
    found = gradients_after(small, example)
    assert all(a is b or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    small.zero_grad(set_to_none=True)
    with measure_peak("cuda") as peak:
        example.step(small)
    assert peak.peak_bytes <= small.plan.budget_bytes
    assert small.plan.predicted_peak_bytes == pytest.approx(
        small.plan.measured_peak_bytes, rel=0.03, abs=2**14
    )


def test_a_step_on_another_stream_gives_the_same_bits():
    example = zoo.build("gpt2").to("cuda")
    small = remat.rematerialize(
        copy.deepcopy(example.model), example.args, example.kwargs, budget=0.7, limit_seconds=5
    )
    expected = gradients_after(copy.deepcopy(small), example)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = gradients_after(small, example)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(a is b or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
