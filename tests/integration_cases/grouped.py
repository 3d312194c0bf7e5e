"""A model whose steps run by compiled groups, compared with eager."""

import torch
from torch import nn

import remat

WIDTH = 8


class Layers(nn.Module):
    """Layers with a norm, a GELU that is written out, and a dropout; all outputs can be trained."""

    def __init__(self, depth=2, broken=False):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(depth))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.broken = broken

    def forward(self, x):
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            hidden = up(norm(x))
            hidden = 0.5 * hidden * (1 + torch.tanh(0.8 * (hidden + 0.04 * hidden**3)))
            x = x + down(nn.functional.dropout(hidden, 0.2, self.training))
            if self.broken:
                torch._dynamo.graph_break()
        self.seen.mul_(0.9).add_(x.detach().mean((0, 1)))
        return {"loss": x.square().mean(), "last": x.sigmoid() * 2}


def batch(rows=4):
    return torch.randn(rows, 6, WIDTH, dtype=torch.double)


def compiled(model, *args, budget="1MiB", **options):
    """Plan by estimates, by which groups are faster."""
    return remat.rematerialize(
        model, args, budget=budget, kernels="inductor", wait=True, costs="estimate",
        limit_seconds=0.1, **options,
    )  # fmt: skip


def groups(model):
    return sum(op.name.endswith("__fused") for graph, _ in model.plan.runs for op in graph.ops)


def step(model, *args, of=lambda output: output["loss"]):
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    loss = of(model(*args))
    loss.backward()
    return loss.detach()


def assert_same_steps(ours, plain, *args, **options):
    for _ in range(2):
        one, two = (step(model, *args, **options) for model in (ours, plain))
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)
        for a, b in zip(ours.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
