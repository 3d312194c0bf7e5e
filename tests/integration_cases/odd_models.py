"""Models as people write them: those that train, at once or in parts, and those refused."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from integration_cases.made import Made, linear, rows, tokens, with_a_frozen_layer
from integration_cases.odd_forwards import FORWARDS
from integration_cases.odd_layers import LAYERS


def made_to_require_a_gradient_and_returned(m, x):
    y = m.frozen(x).requires_grad_()
    return m.leave(y.tanh()), y.tanh(), y


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

RIGHT = LAYERS | FORWARDS
