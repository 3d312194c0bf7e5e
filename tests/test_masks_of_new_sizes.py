"""Masks that are made of sizes are computed for each size, within a bound, and looked at."""

from __future__ import annotations

import math

import pytest
import torch
from integration_cases.sized import gradients, model_of
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import remat
from remat_graph.torch.rewrites import attention


class Windowed(nn.Module):
    """Attention by a mask that is made of sizes: causal, and of a window if that is shorter."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.qkv, self.out, self.window = nn.Linear(8, 48), nn.Linear(16, 8), window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])
        behind = at[:, None] - at
        seen = (behind >= 0) & (behind < self.window)
        mask = torch.where(seen, 0.0, -math.inf)[None, None].expand(x.shape[0], 1, -1, -1)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2)).tanh().square().mean()


@pytest.mark.sweep
@pytest.mark.parametrize("window", [100, 21, 30])
def test_a_mask_that_is_causal_for_some_sizes_is_looked_at_for_each(
    window: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs of other sizes are read off where it is; else they go through all passes."""
    torch.manual_seed(0)
    model = Windowed(window)
    run = remat.rematerialize(model, budget=2**30, costs="estimate", limit_seconds=1.0)
    passes: list[bool] = []
    for length in (25, 20, 27, 22, 26, 60, 24, 31, 80, 28):
        x = torch.randn(2, length, 8)
        caplog.clear()
        with caplog.at_level("INFO", "remat_graph.torch.capturing.captures"):
            found = gradients(model, run, (x,))
        passes.append("captured" in caplog.text)
        expected = gradients(model, model_of(model), (x,))
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    assert window == 21 or passes[4:] == [False] + [
        window < length for length in (60, 24, 31, 80, 28)
    ]


@pytest.mark.sweep
def test_a_mask_that_is_too_large_to_be_computed_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where each size goes through all passes."""
    torch.manual_seed(0)
    model = Windowed(100)
    run = remat.rematerialize(model, budget=2**30, costs="estimate", limit_seconds=1.0)
    for length in (25, 20, 27, 26):
        gradients(model, run, (torch.randn(2, length, 8),))
    monkeypatch.setattr(attention, "_MOST_ELEMENTS", 2 * 24 * 24)
    passes: list[bool] = []
    for length in (24, 23, 22):
        caplog.clear()
        with caplog.at_level("INFO", "remat_graph.torch.capturing.captures"):
            gradients(model, run, (torch.randn(2, length, 8),))
        passes.append("captured" in caplog.text)
    monkeypatch.setattr(attention, "_MOST_ELEMENTS", 2 * 20 * 20)
    with caplog.at_level("INFO", "remat_graph.torch.capturing.captures"):
        gradients(model, run, (torch.randn(2, 21, 8),))
    assert passes == [False, False, False]
    assert "captured" in caplog.text
