"""Forwards, arguments and results as people write them, each with a call."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from integration_cases.made import (
    Doubled,
    Made,
    linear,
    rows,
    squares,
    weighted,
    with_a_frozen_layer,
)


def checkpointed(m, x):
    return m.leave(checkpoint(lambda y: m.drop(m.layer(y)).relu(), x, use_reentrant=False))


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


def hooked(m, x):
    y = m.layer(x)
    y.register_hook(lambda gradient: 3 * gradient)
    return m.leave(y)


def made_to_require_a_gradient(m, x):
    y = m.frozen(x).requires_grad_()
    z = m.leave(y.tanh())
    return z if y.requires_grad and y.tanh().requires_grad else z.detach()


def gradient_inside(m, x):
    x = x.detach().requires_grad_()
    y = m.layer(x).tanh().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    return gradient.square().sum() + y


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


# name: (model, args, kwargs, loss)
FORWARDS = {
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
    "made to require a gradient": (
        lambda: with_a_frozen_layer(made_to_require_a_gradient),
        (rows(64, 16),),
        {},
        squares,
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


def quantised(m, x):
    """A VQ-VAE in small: its codes, looked up for one output, are overwritten by averages."""
    y = m.enter(x)
    nearest = torch.cdist(y.detach(), m.codes).argmin(-1)
    found = F.embedding(nearest, m.codes)
    with torch.no_grad():
        m.codes.mul_(0.9).add_(y[: len(m.codes)], alpha=0.1)
    return m.leave(y + (found - y).detach()), squares(y - found.detach())
