"""Slices beside what others add to a model: adapters, layouts, calls of other sizes.

Losses and gradients are those of the plain model within rounding, and each step is measured to be
within a budget that nothing but slices reaches.
"""

import copy

import pytest
import torch
from integration_cases.language import Headed
from stack_cases.sliced import BUDGET, IN_SLICES, assert_close, step, words
from torch import nn

import remat


def test_without_slices_the_budget_is_too_small():
    with pytest.raises(remat.BudgetTooSmall, match=r"rounding.* are enough"):
        remat.rematerialize(Headed(whole=True), (words(0),), **IN_SLICES | {"numerics": None})


@pytest.mark.sweep
@pytest.mark.parametrize("wraps", ["remat", "peft"])
def test_adapters_train_in_slices(wraps):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["up", "down", "out"], init_lora_weights=False)
    if wraps == "remat":
        plain = peft.get_peft_model(Headed(whole=True), config)
        model = sliced = remat.rematerialize(copy.deepcopy(plain), **IN_SLICES)
    else:
        plain = peft.get_peft_model(Headed(whole=True), config)
        sliced = remat.rematerialize(Headed(whole=True), **IN_SLICES)
        model = peft.get_peft_model(sliced, config)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            one.data.copy_(other.data)
    for number in range(2):
        expected, _ = step(plain, words(number))
        found, peak_bytes = step(model, words(number))
        assert_close(found, expected)
        assert len(found) == 7  # the loss, and two gradients for each adapter
        assert peak_bytes <= BUDGET
    assert any(kind.sliced for kind in sliced.plan.kinds)


@pytest.mark.sweep
def test_calls_of_other_sizes_run_in_slices():
    plain = Headed(whole=True)
    model = remat.rematerialize(copy.deepcopy(plain), (words(0),), **IN_SLICES)
    for shape in ((2, 64), (3, 64), (2, 80), (1, 40), (4, 128), (2, 64)):
        ids = words(1, shape)
        expected, _ = step(plain, ids)
        found, peak_bytes = step(model, ids)
        assert_close(found, expected)
        assert peak_bytes <= BUDGET


class Convolutions(nn.Module):
    """A stack without batch norm, which is cut along the batch."""

    def __init__(self, layout):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.GELU(),
            nn.Conv2d(16, 4, 3, padding=1),
        ).to(memory_format=layout)  # fmt: skip

    def forward(self, x):
        return self.net(x).square().mean()


@pytest.mark.sweep
@pytest.mark.parametrize(
    "of_weights",
    [torch.contiguous_format, torch.channels_last],
)
@pytest.mark.parametrize(
    "of_images",
    [torch.contiguous_format, torch.channels_last],
)
def test_layouts_of_a_convolution_stack_in_slices(of_weights, of_images):
    images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    images = images.to(memory_format=of_images)
    plain, budget = Convolutions(of_weights), 3 * 2**19
    step(plain, images)
    expected, plain_bytes = step(plain, images)
    assert plain_bytes > 3 * budget - 2**19
    model = remat.rematerialize(copy.deepcopy(plain), (images,), **IN_SLICES | {"budget": budget})
    for _ in range(2):
        found, peak_bytes = step(model, images)
        assert_close(found, expected)
        assert [each.stride() for each in found] == [each.stride() for each in expected]
        assert peak_bytes <= budget
    assert any(kind.sliced for kind in model.plan.kinds)
