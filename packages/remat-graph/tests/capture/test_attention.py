"""Attention masks: the causal one is named, and no other is taken for it."""

import pytest
import torch
from torch import nn

from remat_graph.torch import capture

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Attention(nn.Module):
    """Attention under a mask, a tensor of numbers or of booleans that is made while it runs."""

    def __init__(self, mask):
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.mask = mask

    def forward(self, x, lengths):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = self.mask(torch.arange(x.shape[1]), lengths)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.square().sum()


def causal(position, _):
    return position[:, None] >= position[None, :]


def causal_numbers_per_sequence(position, lengths):
    allowed = causal(position, None)[None, None].expand(len(lengths), 1, -1, -1)
    return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)


def window(position, _):
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < 3)


def strictly_earlier_or_first(position, _):
    return (position[:, None] > position[None, :]) | (position[None, :] == 0)


def softly_causal(position, _):
    return torch.where(causal(position, None), 0.0, -1e4)


def lengths_too(position, lengths):
    inside = position[None, None, None, :] < lengths[:, None, None, None]
    return causal(position, None) & inside


def drawn(position, _):
    return causal(position, None) | (torch.rand(len(position), len(position)) < 0.0)


def attention_calls(mask):
    torch.manual_seed(0)
    model = Attention(mask)
    call = (torch.randn(3, 12, 16), torch.full((3,), 12))
    program = capture(model, call, costs="estimate").program
    found = {c.target: c for c in program.calls.values() if c.target in (FORWARD, BACKWARD)}
    assert set(found) == {FORWARD, BACKWARD}
    return program, found


def causal_of_many_sums(position, _):
    for _ in range(64):  # each reads the one before twice: there are 2**64 ways through
        position = (position + position) // 2
    return causal(position, None)


@pytest.mark.parametrize("mask", [causal, causal_numbers_per_sequence, causal_of_many_sums])
def test_a_mask_that_is_the_causal_one_is_not_made(mask):
    program, found = attention_calls(mask)
    for call in found.values():
        names = [argument.name for argument in call.target._schema.arguments]
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        assert given["is_causal"] is True
        assert given.get("attn_mask") is None
    made = {aten.where.self, aten.arange.default, aten.masked_fill.Scalar}
    assert not made & {call.target for call in program.calls.values()}


@pytest.mark.parametrize(
    "mask", [window, strictly_earlier_or_first, softly_causal, lengths_too, drawn]
)
def test_another_mask_is_kept(mask):
    _, found = attention_calls(mask)
    for call in found.values():
        assert call.kwargs["attn_mask"] is not None
