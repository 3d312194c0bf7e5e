"""Layers and operators in models as people write them, each with a call."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from integration_cases.made import Made, linear, rows, squares, tokens, weighted


def cells(m, x):
    hidden = torch.zeros(x.shape[1], 16)
    for row in x:
        hidden = m.cell(row, hidden)
    return hidden


def masked_attention(m, x, mask, pad):
    attended, weights = m.attend(x, x, x, attn_mask=mask, key_padding_mask=pad)
    return attended + x, weights


def attention(m, x):
    q, k, v = (part.view(2, 6, 2, 8).transpose(1, 2) for part in m.layer(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def recurrence(m, x):
    h, out = x.new_zeros(8, 16), []
    for _ in range(4):
        gate = torch.sigmoid(m.gate(x))
        h = gate * h + m.layer(x) * (1 - gate)
        out.append(h)
    return torch.stack(out, 1)


def variational(m, x):
    mean, log_variance = m.mean(x), m.spread(x)
    return m.leave(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


def experts(m, x):
    outputs = torch.stack([m.left(x), m.right(x)], 1)
    chosen = m.gate(x).argmax(1)[:, None, None].expand(-1, 1, 16)
    return outputs.gather(1, chosen)[:, 0]


def seen_statistics(m, x):
    return torch.tanh(m.norm(m.layer(x)) * m.norm.running_var) + m.norm.running_mean


def under_autocast(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.group(m.layer(x).view(8, 4, 4)).flatten(1)
        return m.leave(m.batch(m.norm(y)))


def normalised(parametrization, **options):
    return nn.Sequential(parametrization(linear(), **options), nn.ReLU(), linear())


def polar(z):
    return torch.polar(torch.tanh(z.abs()), z.angle())


MASK = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
PAD = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
W = torch.randn(9, dtype=torch.cfloat, generator=torch.Generator().manual_seed(1))

# name: (model, args, kwargs, loss)
LAYERS = {
    "lstm": (
        lambda: Made(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(8, 12, 2, batch_first=True)),
        (rows(3, 5, 8),),
        {},
        squares,
    ),
    "dropout inside an rnn of a model": (
        lambda: Made(
            lambda m, x: m.leave(m.rnn(m.layer(x))[0]),
            layer=linear(),
            rnn=nn.GRU(16, 16, 2, dropout=0.5),
            leave=linear(),
        ),
        (rows(3, 2, 16),),
        {},
        squares,
    ),
    "bidirectional gru": (
        lambda: Made(lambda m, x: m.rnn(x)[0], rnn=nn.GRU(8, 6, bidirectional=True)),
        (rows(4, 3, 8),),
        {},
        squares,
    ),
    "cells": (lambda: Made(cells, cell=nn.GRUCell(8, 16)), (rows(4, 3, 8),), {}, squares),
    "recurrence": (lambda: Made(recurrence, layer=linear(), gate=linear()), (rows(),), {}, squares),
    "masked attention": (
        lambda: Made(masked_attention, attend=nn.MultiheadAttention(16, 4, 0.1, batch_first=True)),
        (rows(2, 6, 16),),
        {"mask": MASK, "pad": PAD},
        weighted,
    ),
    "attention": (lambda: Made(attention, layer=linear(16, 48)), (rows(2, 6, 16),), {}, squares),
    "complex": (
        lambda: Made(
            lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * m.w).tanh(), w=nn.Parameter(W)
        ),
        (rows(),),
        {},
        squares,
    ),
    "complex, by polar coordinates": (
        lambda: Made(
            lambda m, x: polar(polar(torch.fft.rfft(m.layer(x))) * m.w).real,
            layer=linear(),
            w=nn.Parameter(W),
        ),
        (rows(),),
        {},
        squares,
    ),
    "complex output": (
        lambda: Made(
            lambda m, x: torch.fft.rfft(m.layer(x)) * m.w, layer=linear(), w=nn.Parameter(W)
        ),
        (rows(),),
        {},
        lambda output: output.abs().square().mean(),
    ),
    "weight norm": (
        lambda: normalised(nn.utils.parametrizations.weight_norm),
        (rows(),),
        {},
        squares,
    ),
    "orthogonal": (
        lambda: normalised(nn.utils.parametrizations.orthogonal),
        (rows(),),
        {},
        squares,
    ),
    "spectral norm": (
        lambda: normalised(nn.utils.parametrizations.spectral_norm),
        (rows(),),
        {},
        squares,
    ),
    "embedding bag": (
        lambda: Made(
            lambda m, t, o: m.leave(m.bag(t, o)), bag=nn.EmbeddingBag(20, 16), leave=linear()
        ),
        (tokens(12), torch.tensor([0, 4, 7])),
        {},
        squares,
    ),
    "padded embedding": (
        lambda: nn.Sequential(nn.Embedding(20, 16, padding_idx=0), linear()),
        (tokens(3, 4),),
        {},
        squares,
    ),
    "bfloat16": (
        lambda: nn.Sequential(linear(), nn.ReLU(), nn.LayerNorm(16)).bfloat16(),
        (rows().bfloat16(),),
        {},
        squares,
    ),
    "half": (
        lambda: nn.Sequential(linear(), nn.ReLU(), nn.LayerNorm(16)).half(),
        (rows().half(),),
        {},
        squares,
    ),
    "double": (
        lambda: nn.Sequential(
            nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.PReLU(), nn.MaxPool1d(2), nn.GroupNorm(2, 8)
        ).double(),
        (rows(3, 4, 16).double(),),
        {},
        squares,
    ),
    "norms under autocast": (
        lambda: Made(
            under_autocast,
            layer=linear(),
            group=nn.GroupNorm(2, 4),
            norm=nn.LayerNorm(16),
            batch=nn.BatchNorm1d(16),
            leave=linear(),
        ),
        (rows(),),
        {},
        squares,
    ),
    "channels last": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 4, 3)
        ).to(memory_format=torch.channels_last),
        (rows(2, 4, 8, 8).to(memory_format=torch.channels_last),),
        {},
        squares,
    ),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.Dropout2d(0.3), nn.InstanceNorm2d(8, track_running_stats=True)
        ),
        (rows(2, 4, 8, 8),),
        {},
        squares,
    ),
    "statistics that are read": (
        lambda: Made(seen_statistics, layer=linear(), norm=nn.BatchNorm1d(16)),
        (rows(),),
        {},
        squares,
    ),
    "draws of every kind": (
        lambda: Made(
            lambda m, x: F.rrelu(m.layer(x), training=True)[torch.randperm(8)]
            + torch.randn_like(x)
            + torch.rand(16)
            + torch.bernoulli(torch.full((8, 16), 0.5)),
            layer=linear(),
        ),
        (rows(),),
        {},
        squares,
    ),
    "variational": (
        lambda: Made(variational, mean=linear(16, 4), spread=linear(16, 4), leave=linear(4, 16)),
        (rows(),),
        {},
        weighted,
    ),
    "gumbel": (
        lambda: Made(
            lambda m, x: F.gumbel_softmax(m.layer(x), hard=True) @ m.w,
            layer=linear(),
            w=nn.Parameter(rows(16, 3)),
        ),
        (rows(),),
        {},
        squares,
    ),
    "experts": (
        lambda: Made(experts, left=linear(), right=linear(), gate=linear(16, 2)),
        (rows(),),
        {},
        squares,
    ),
    "sorted": (
        lambda: Made(
            lambda m, x: m.layer(x).topk(4, 1)[0] + m.layer(x).sort(1)[0][:, :4], layer=linear()
        ),
        (rows(),),
        {},
        squares,
    ),
    "loss inside": (
        lambda: Made(
            lambda m, x, t: F.cross_entropy(m.layer(x), t, label_smoothing=0.1),
            layer=linear(16, 20),
        ),
        (rows(), tokens(8)),
        {},
        squares,
    ),
    "interpolated": (
        lambda: Made(
            lambda m, x: F.interpolate(
                F.pad(m.conv(x), (1,) * 4, "reflect"), scale_factor=2, mode="bilinear"
            ),
            conv=nn.Conv2d(2, 3, 3),
        ),
        (rows(2, 2, 8, 8),),
        {},
        squares,
    ),
}
