"""Models as people write them, each with a call: those that train, and those that are refused."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint


class Made(nn.Module):
    """A module with the given forward and parts."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.made = forward

    def forward(self, *args, **kwargs):
        return self.made(self, *args, **kwargs)


class Doubled(torch.autograd.Function):
    """A function whose backward is not its derivative, so that it cannot be mistaken."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.clamp(min=0) * factor

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * (x > 0) * ctx.factor, None


def linear(enter=16, leave=16):
    return nn.Linear(enter, leave)


def squares(output):
    return output.float().square().mean()


def weighted(outputs):
    return sum((i + 1) * squares(output) for i, output in enumerate(outputs))


def rows(*shape):
    return torch.randn(*(shape or (8, 16)), generator=torch.Generator().manual_seed(7))


def tokens(*shape):
    return torch.randint(20, shape, generator=torch.Generator().manual_seed(7))


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


def checkpointed(m, x):
    return m.leave(checkpoint(lambda y: m.drop(m.layer(y)).relu(), x, use_reentrant=False))


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


def many(m, *xs, scale=1.0, flag=False, mode=None, **more):
    total = sum(m.layer(x) for x in xs) * scale * (2 if flag else 1)
    return total if mode is None else total + more["bias"]


def rolling(m, x):
    y = m.layer(x)
    m.past[1:] = m.past[:-1].clone()
    m.past[0] = y.detach().mean(0)
    return y + m.past.mean(0)


def assigned(m, x):
    y = m.layer(x)
    y[:, 3:5] += 1
    y[0, 1] = m.layer.bias[0]
    y.relu_()
    return y


def detached_and_changed(m, x):
    y = m.layer(x)
    z = y.detach()
    z.add_(y.tanh())
    return z


def viewed(m, x):
    y = m.layer(x).relu()
    return y[:, :4], y[:, 4:], y.t(), y


def seen_statistics(m, x):
    return torch.tanh(m.norm(m.layer(x)) * m.norm.running_var) + m.norm.running_mean


def under_autocast(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.group(m.layer(x).view(8, 4, 4)).flatten(1)
        return m.leave(m.batch(m.norm(y)))


def hooked(m, x):
    y = m.layer(x)
    y.register_hook(lambda gradient: 3 * gradient)
    return m.leave(y)


def made_to_require_a_gradient(m, x):
    y = m.frozen(x).requires_grad_()
    z = m.leave(y.tanh())
    return z if y.requires_grad and y.tanh().requires_grad else z.detach()


def made_to_require_a_gradient_and_returned(m, x):
    y = m.frozen(x).requires_grad_()
    return m.leave(y.tanh()), y.tanh(), y


def with_a_frozen_layer(forward):
    return Made(forward, frozen=linear().requires_grad_(False), leave=linear())


def gradient_inside(m, x):
    x = x.detach().requires_grad_()
    y = m.layer(x).tanh().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    return gradient.square().sum() + y


def normalised(parametrization, **options):
    return nn.Sequential(parametrization(linear(), **options), nn.ReLU(), linear())


def polar(z):
    return torch.polar(torch.tanh(z.abs()), z.angle())


def shared():
    layer = linear()
    first, second = nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer, nn.ReLU())
    return Made(lambda m, x: m.second(m.first(x)) + m.first(x), first=first, second=second)


def reused():
    layer = nn.Sequential(linear(), nn.BatchNorm1d(16), nn.Dropout(0.3))
    return nn.Sequential(layer, nn.ReLU(), layer)


def repeated():
    return nn.Sequential(*[nn.ModuleList([linear()])[0]] * 3)


def with_hooks():
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    model[0].register_forward_hook(lambda m, a, output: 2 * output)
    model[2].register_full_backward_hook(lambda m, given, out: (given[0] * 0.5,))
    return model


def partly_frozen():
    model = nn.Sequential(linear(), nn.BatchNorm1d(16), nn.ReLU(), linear())
    model[0].requires_grad_(False)
    model[1].eval()
    return model


MASK = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
PAD = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
W = torch.randn(9, dtype=torch.cfloat, generator=torch.Generator().manual_seed(1))

# name: (model, args, kwargs, loss)
RIGHT = {
    "codes that are overwritten, and a scalar beside the output": (
        lambda: Made(
            quantised,
            enter=nn.Sequential(linear(), nn.GELU(), linear(), nn.GELU(), linear()),
            leave=nn.Sequential(linear(), nn.GELU(), linear(), nn.GELU(), linear()),
            codes=rows(4, 16),
        ),
        (rows(64, 16),),
        {},
        weighted,
    ),
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
    "made to require a gradient": (
        lambda: with_a_frozen_layer(made_to_require_a_gradient),
        (rows(64, 16),),
        {},
        squares,
    ),
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
    "shared submodule": (shared, (rows(),), {}, squares),
    "layer at two places": (reused, (rows(),), {}, squares),
    "one layer three times": (repeated, (rows(),), {}, squares),
    "checkpoint inside": (
        lambda: Made(checkpointed, layer=linear(), drop=nn.Dropout(0.2), leave=linear(16, 4)),
        (rows(),),
        {},
        squares,
    ),
    "custom function": (
        lambda: Made(
            lambda m, x: m.leave(Doubled.apply(m.layer(x), 1.5)), layer=linear(), leave=linear()
        ),
        (rows(),),
        {},
        squares,
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
    "loss of views": (
        lambda: nn.Sequential(linear(), nn.GELU(), linear()),
        (rows(),),
        {},
        lambda y: y[:, :6].exp().sum() + y.view(4, 2, 16)[:, 0].square().sum(),
    ),
    "views": (
        lambda: Made(
            viewed,
            layer=linear(),
        ),
        (rows(),),
        {},
        weighted,
    ),
    "chunks": (
        lambda: Made(lambda m, x: m.layer(x).chunk(4, 1), layer=linear()),
        (rows(),),
        {},
        weighted,
    ),
    "rows of no batch": (
        lambda: nn.Sequential(linear(), nn.ReLU(), linear()),
        (rows(0, 16),),
        {},
        lambda y: y.sum(),
    ),
    "empty part": (
        lambda: Made(lambda m, x, e: m.layer(torch.cat([x, e])), layer=linear()),
        (rows(), rows(0, 16)),
        {},
        squares,
    ),
    "scalar parameters": (
        lambda: Made(
            lambda m, x: m.layer(x) * m.t.exp() + m.b,
            layer=linear(),
            t=nn.Parameter(torch.tensor(0.3)),
            b=nn.Parameter(torch.tensor(1.0)),
        ),
        (rows(),),
        {},
        squares,
    ),
    "arguments of every kind": (
        lambda: Made(many, layer=linear()),
        (rows(), rows() + 1, rows()),
        {"scale": 0.5, "flag": True, "mode": "q", "bias": rows(16)},
        squares,
    ),
    "no optional arguments": (lambda: Made(many, layer=linear()), (rows(),), {}, squares),
    "nested arguments": (
        lambda: Made(lambda m, d: m.layer(d["x"][0]) + d["x"][1]["y"] * d["s"], layer=linear()),
        ({"x": [rows(), {"y": rows()}], "s": 2},),
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
    "rolling buffer": (
        lambda: Made(rolling, layer=linear(), past=torch.zeros(4, 16)),
        (rows(),),
        {},
        squares,
    ),
    "assigned in place": (lambda: Made(assigned, layer=linear()), (rows(),), {}, squares),
    "gradient inside": (lambda: Made(gradient_inside, layer=linear()), (rows(),), {}, squares),
    "vmap": (
        lambda: Made(lambda m, x: torch.vmap(lambda row: m.layer(row).tanh())(x), layer=linear()),
        (rows(),),
        {},
        squares,
    ),
    "functional call": (
        lambda: Made(
            lambda m, x: torch.func.functional_call(m.layer, {"bias": 2 * m.layer.bias}, x),
            layer=linear(),
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
    "parameter containers": (
        lambda: Made(
            lambda m, x: x @ m.items[0] + x @ m.items[1] * m.named["k"],
            items=nn.ParameterList([nn.Parameter(rows(16, 4)) for _ in range(2)]),
            named=nn.ParameterDict({"k": nn.Parameter(rows(4))}),
        ),
        (rows(),),
        {},
        squares,
    ),
    "unused parameter": (
        lambda: Made(lambda m, x: m.layer(x), layer=linear(), other=linear()),
        (rows(),),
        {},
        squares,
    ),
    "stopped gradient": (
        lambda: Made(lambda m, x: m.a(x).detach() * m.b(x) + m.a(x), a=linear(), b=linear()),
        (rows(),),
        {},
        squares,
    ),
    "constants inside": (
        lambda: Made(
            lambda m, x: m.layer(x) * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3),
            layer=linear(16, 3),
        ),
        (rows(),),
        {},
        squares,
    ),
    "hooks inside": (with_hooks, (rows(),), {}, squares),
    "hook on a tensor": (
        lambda: Made(hooked, layer=linear(), leave=linear()),
        (rows(),),
        {},
        squares,
    ),
    "partly frozen": (partly_frozen, (rows(),), {}, squares),
    "transposed input": (
        lambda: nn.Sequential(linear(), nn.ReLU()),
        (rows(16, 8).t(),),
        {},
        squares,
    ),
    "expanded input": (
        lambda: nn.Sequential(linear(), nn.ReLU()),
        (rows(1, 16).expand(8, 16),),
        {},
        squares,
    ),
    "scalar output": (
        lambda: Made(lambda m, x: m.layer(x).mean(), layer=linear()),
        (rows(),),
        {},
        squares,
    ),
    "detached and changed by what it was detached from": (
        lambda: Made(detached_and_changed, layer=linear()),
        (rows(),),
        {},
        squares,
    ),
    "buffer returned": (
        lambda: Made(
            lambda m, x: (m.layer(x) * m.n.add_(1), m.n), layer=linear(), n=torch.zeros(())
        ),
        (rows(),),
        {},
        lambda y: squares(y[0]),
    ),
}


def reentrant(m, x):
    return checkpoint(m.layer, m.layer(x), use_reentrant=True)


def branching(m, x):
    y = m.layer(x)
    if y.sum() > 0:
        return m.leave(y.relu())
    return m.other(y)


def chosen_rows(m, x):
    rows = (m.layer(x)[:, 0] > 0).nonzero()[:, 0]
    return m.leave(m.layer(x[rows]).tanh())


def looping(m, x):
    for layer in m.layers:
        x = layer(x)
        if x.abs().max() > 1e3:
            break
        x = x.relu()
    return m.leave(x)


def halting(m, x):
    steps = 0
    while x.norm() < 30 and steps < 6:
        x = x + m.layer(x).relu()
        steps += 1
    return m.leave(x)


def remembering(m, x):
    y = m.layer(x)
    m.calls += 1
    m.last = y.detach()
    return m.leave(y) * m.calls


def moving(m, x):
    y = m.layer(x).tanh()
    before, m.average = m.average, 0.9 * m.average + 0.1 * y.detach().mean(0)
    return m.leave(y - before)


def shaken(m, x):
    return m.leave(m.layer(x) * (1 + random.random())) * float(np.random.rand())


def dropped_layers(m, x):
    for layer in m.layers:
        if random.random() < 0.5:
            x = layer(x)
    return m.leave(x)


def between_breaks(m, x):
    y = m.layer(x)
    half = y[:, :8]
    torch._dynamo.graph_break()
    half.mul_(2)
    m.seen += y.detach().mean(0)
    torch._dynamo.graph_break()
    return m.leave(y.relu_() + m.seen), half


def quantised(m, x):
    """A VQ-VAE in small: its codes, looked up for one output, are overwritten by averages."""
    y = m.enter(x)
    nearest = torch.cdist(y.detach(), m.codes).argmin(-1)
    found = F.embedding(nearest, m.codes)
    with torch.no_grad():
        m.codes.mul_(0.9).add_(y[: len(m.codes)], alpha=0.1)
    return m.leave(y + (found - y).detach()), squares(y - found.detach())


def checkpointed_branch(m, x):
    return m.leave(checkpoint(m.branch, m.drop(x), use_reentrant=False))


def storing():
    model = Made(lambda m, x: m.leave(m.layer(x)) + m.kept[-1], layer=linear(), leave=linear())
    model.kept = []
    model.layer.register_forward_hook(lambda m, a, output: model.kept.append(output.detach()))
    return model


def branch(**parts):
    return Made(branching, layer=linear(), leave=linear(), other=linear(), **parts)


OUTSIDE = torch.randn(16, generator=torch.Generator().manual_seed(3))

# Those that run in several regions, and what was refused once: name: (model, x)
IN_PARTS = {
    "reentrant checkpoint": (lambda: Made(reentrant, layer=linear()), rows()),
    "rows chosen by data": (lambda: Made(chosen_rows, layer=linear(), leave=linear()), rows()),
    "batch norm with a cumulative mean": (
        lambda: nn.Sequential(linear(), nn.BatchNorm1d(16, momentum=None), nn.Tanh(), linear()),
        rows(),
    ),
    "old spectral norm": (
        lambda: nn.Sequential(nn.utils.spectral_norm(linear()), nn.ReLU(), linear()),
        rows(),
    ),
    "old weight norm": (
        lambda: nn.Sequential(nn.utils.weight_norm(linear()), nn.ReLU(), linear()),
        rows(),
    ),
    "tensor from outside": (
        lambda: Made(lambda m, x: m.layer(x) + OUTSIDE, layer=linear()),
        rows(),
    ),
    "compiled inside": (
        lambda: Made(lambda m, x: m.layer(x), layer=torch.compile(linear(), backend="eager")),
        rows(),
    ),
    "made to require a gradient, and returned": (
        lambda: with_a_frozen_layer(made_to_require_a_gradient_and_returned),
        rows(),
    ),
    "branch": (branch, rows()),
    "branches in a sequence": (
        lambda: nn.Sequential(linear(), branch(), nn.Dropout(0.3), branch(), linear()),
        rows(),
    ),
    "branch between batch norms": (
        lambda: nn.Sequential(nn.BatchNorm1d(16), branch(), nn.BatchNorm1d(16)),
        rows(),
    ),
    "branch in a checkpoint": (
        lambda: Made(checkpointed_branch, branch=branch(), drop=nn.Dropout(0.3), leave=linear()),
        rows(),
    ),
    "loop over data": (
        lambda: Made(
            looping, layers=nn.ModuleList(linear() for _ in range(3)), leave=linear(16, 4)
        ),
        rows(),
    ),
    "as many steps as data needs": (lambda: Made(halting, layer=linear(), leave=linear()), rows()),
    "stored tensor and counter": (
        lambda: Made(remembering, layer=linear(), leave=linear(), calls=0),
        rows(),
    ),
    "stored average": (
        lambda: Made(moving, layer=linear(), leave=linear(), average=torch.zeros(16)),
        rows(),
    ),
    "hook that stores": (storing, rows()),
    "batch norm alone, with a simple average": (
        lambda: nn.BatchNorm1d(rows().shape[1], momentum=None),
        rows(),
    ),
    "python's and numpy's random numbers": (
        lambda: Made(shaken, layer=linear(), leave=linear()),
        rows(),
    ),
    "layers dropped by python's random numbers": (
        lambda: Made(
            dropped_layers, layers=nn.ModuleList(linear() for _ in range(3)), leave=linear(16, 4)
        ),
        rows(),
    ),
    "changed in place between breaks": (
        lambda: Made(between_breaks, layer=linear(), leave=linear(), seen=torch.zeros(16)),
        rows(),
    ),
}

REFUSED = {
    "sparse embedding": (lambda: nn.Embedding(20, 4, sparse=True), tokens(3), "sparse=False"),
}
