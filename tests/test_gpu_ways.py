"""What else a plan may do holds on CUDA, too: slices, compiled groups, checksums, several regions.

`hatch run test tests/test_gpu_ways.py` with a GPU. Each body runs on the CPU as well.
"""

import copy

import pytest
import torch
from integration_cases.broken import pair
from integration_cases.devices import anywhere, everywhere
from integration_cases.grouped import Layers, batch, compiled, groups, step
from integration_cases.language import Language
from integration_cases.sliced_models import trained
from torch import nn

import remat
from remat_exec import checksum, measure_peak


def assert_near(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def peak_of_a_step(run, model, args, device):
    model.zero_grad(set_to_none=True)
    with measure_peak(device) as peak:
        trained(run, model, args)
    return peak.peak_bytes


@anywhere
def test_slices_are_right_and_within_the_budget(device):
    torch.manual_seed(0)
    plain = Language().to(device)
    args = (plain.ids.to(device),)
    expected = [each.clone() for each in trained(plain, plain, args)]
    budget = int(0.4 * peak_of_a_step(plain, plain, args, device))
    model = remat.rematerialize(
        copy.deepcopy(plain), args, budget=budget, numerics="rounding", limit_seconds=0.1
    )
    assert model.plan.kinds[0].sliced
    assert_near(trained(model, model, args), expected, rtol=1e-3, atol=1e-6)
    assert peak_of_a_step(model, model, args, device) <= budget


@anywhere
@pytest.mark.usefixtures("kernels_compiled_here")
def test_compiled_groups_are_right_and_within_the_budget(device):
    plain, x = Layers().double().to(device).eval(), batch().to(device)
    model = compiled(copy.deepcopy(plain), x)
    assert groups(model) > 4
    assert "run_fused" in model.plan.source
    for _ in range(2):
        losses = step(model, x), step(plain, x)
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)
        gradients = ([p.grad for p in each.parameters()] for each in (model, plain))
        assert_near(*gradients, rtol=1e-9, atol=1e-12)
        assert_near(model.buffers(), plain.buffers(), rtol=1e-9, atol=1e-12)
    with measure_peak(device) as peak:
        step(model, x)
    assert peak.peak_bytes <= model.plan.budget_bytes


PLACES = {
    "in one piece": lambda memory: memory[:-1].view(-1, 64),
    "at an odd number": lambda memory: memory[1:].view(-1, 64),
    "in columns": lambda memory: memory[:-1].view(-1, 64)[:, :63],
    "transposed": lambda memory: memory[:-1].view(-1, 64).t(),
    "repeated": lambda memory: memory[:64].expand(512, -1),
}


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_checksums_are_the_same_on_every_device(place, dtype, device):
    memory = torch.randn(64 * 4096 + 1).to(dtype)
    here, there = place(memory), place(memory.to(device))
    for by_elements in (True, False):
        expected = checksum(here, by_elements=by_elements)
        with measure_peak(device) as peak:
            found = checksum(there, by_elements=by_elements)
        assert int(found) % 2**64 == expected
        assert peak.peak_bytes <= 8 * 2**20


def layers(width):
    return nn.Sequential(nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8))


@everywhere
def test_an_input_that_is_written_to_is_noticed(device):
    torch.manual_seed(0)
    model, x = layers(64).to(device), torch.randn(512, 64, device=device)
    model = remat.rematerialize(model, (x,), budget=0.7, limit_seconds=0.1)
    assert "check__" in model.plan.source
    model(x).square().mean().backward()
    loss = model(x).square().mean()
    x.data.mul_(2)
    with pytest.raises(remat.BackwardError, match="where torch does not count it"):
        loss.backward()


@everywhere
@pytest.mark.parametrize("place", ["at an odd number", "in columns", "repeated"])
def test_what_is_saved_on_the_host_has_not_changed(place, device):
    torch.manual_seed(0)
    x = PLACES[place](torch.randn(64 * 512 + 1, device=device))
    plain = layers(x.shape[1]).to(device)
    model = remat.rematerialize(copy.deepcopy(plain), (x,), budget=0.7, limit_seconds=0.1)
    assert "check__" in model.plan.source
    expected = trained(lambda x: plain(x).square().mean(), plain, (x,))
    with torch.autograd.graph.save_on_cpu():
        found = trained(lambda x: model(x).square().mean(), model, (x,))
    assert_near(found, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, of what is traced
@anywhere
def test_several_regions_are_right_and_within_one_budget(device):
    original, plain, x, y = pair()
    args = x.to(device), y.to(device)
    traced = torch.compile(plain.to(device), backend="aot_eager_default_partitioner")

    def loss(run):
        return lambda x, y: nn.functional.cross_entropy(run(x), y)

    budget = int(0.6 * peak_of_a_step(loss(plain), plain, args, device))
    model = remat.rematerialize(original.to(device), budget=budget, limit_seconds=0.1)
    for seed in range(5):
        found = []
        for run, one in ((model, model), (traced, plain)):
            torch.manual_seed(seed)
            found.append(trained(loss(run), one, args))
        assert_near(*found)
    assert len(model.plan.calls) > 1
    assert model.plan.recomputations > 0
    assert model.plan.measured_peak_bytes <= budget
    assert peak_of_a_step(loss(model), model, args, device) <= budget
