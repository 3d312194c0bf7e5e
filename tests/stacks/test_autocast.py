"""Autocast and 16-bit types: the bits of eager, wherever forward and backward are called."""

import copy
import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from stack_cases.models import LIMIT_SECONDS, rematerialized
from torch import nn

import remat
from loop_cases.models import Blocks, batch, made, square

BF16, FP16 = torch.bfloat16, torch.float16
STEPS = 2


@dataclass(frozen=True)
class Loop:
    """The type of the autocast around the forward and around the backward, and of the weights."""

    forward: torch.dtype | None = None
    backward: torch.dtype | None = None
    weights: torch.dtype | None = None
    scaled: bool = False

    def model(self):
        # In 16 bits eager rounds a dropout's scale before it multiplies, a traced one after it.
        dropout = 0.0 if self.weights else 0.1
        return made(Blocks, dropout=dropout).to(self.weights or torch.float32)

    def train(self, model):
        """Give the outputs, losses and gradients of each step, and the weights."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=self.scaled)
        found = []
        torch.manual_seed(1)
        for step in range(STEPS):
            optimizer.zero_grad()
            with cast(self.forward):
                output = model(batch(step).to(self.weights or torch.float32))
                loss = square(output.float())
            with cast(self.backward):
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found += [output.detach(), loss.detach()]
            found += [parameter.grad.clone() for parameter in model.parameters()]
        return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


def cast(dtype):
    return torch.autocast("cpu", dtype=dtype) if dtype else nullcontext()


LOOPS = {
    "bf16 around both": Loop(BF16, BF16),
    "bf16 around the forward": Loop(BF16),
    "bf16 around the backward": Loop(None, BF16),
    "fp16 around the backward": Loop(None, FP16),
    "fp16 around the forward, scaled": Loop(FP16, scaled=True),
    "weights in bf16": Loop(weights=BF16),
    "weights in fp16": Loop(weights=FP16),
    "weights in bf16, within bf16": Loop(BF16, weights=BF16),
}


def whole(model, dtype):
    """By a plan that recomputes, with room for what autocast adds in the backward."""
    args = (batch(0).to(dtype),)
    plan = remat.plan(model, args, budget=0.8, limit_seconds=LIMIT_SECONDS)
    return remat.rematerialize(model, plan=dataclasses.replace(plan, budget_bytes=2**20))


def by_regions(model, _):
    return remat.rematerialize(
        model, budget="1MiB", regions="layers.*", limit_seconds=LIMIT_SECONDS
    )


def by_back_end(model, _):
    options = {"budget": "1MiB", "limit_seconds": LIMIT_SECONDS}
    return torch.compile(model, backend="remat", options=options)


WAYS = {
    "whole": whole,
    "regions": by_regions,
    "back end": by_back_end,
}
KEPT = {
    ("bf16 around both", "whole"),
    ("bf16 around the backward", "back end"),
    ("fp16 around the forward, scaled", "regions"),
    ("weights in fp16", "whole"),
}


@pytest.fixture
def _fresh_compiler():
    """What one test has compiled is not there for the next."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if (name, way) in KEPT else pytest.mark.sweep)
        for name in LOOPS
        for way in WAYS
    ],
)
def test_the_bits_are_those_of_eager(name, way):
    loop = LOOPS[name]
    with cast(loop.forward):
        model = WAYS[way](loop.model(), loop.weights or torch.float32)
    for got, expected in zip(loop.train(model), loop.train(loop.model()), strict=True):
        assert torch.equal(got, expected)
    if way == "whole":
        assert model.plan.recomputations > 0
    assert not torch.is_autocast_enabled("cpu")


class Mixed(nn.Module):
    """Convolution, attention and batched products."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 16, 3, padding=1), nn.BatchNorm1d(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.leave = nn.Linear(16, 4)

    def forward(self, x):
        h = torch.relu(self.norm(self.conv(x))).transpose(1, 2)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.leave(torch.baddbmm(h, h.softmax(-1) @ h.transpose(1, 2), h))


@pytest.mark.parametrize("autocast", [BF16, FP16])
def test_a_backward_of_many_kinds_of_operators_within_autocast(autocast):
    x = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(0))
    found = []
    for model in (rematerialized(made(Mixed), x, budget="1MiB"), made(Mixed)):
        loss = square(model(x))
        with torch.autocast("cpu", dtype=autocast):
            loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


class InFullPrecision(nn.Module):
    """Products that leave the autocast around them, for themselves or within another one."""

    def __init__(self):
        super().__init__()
        self.enter, self.full, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.own = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        h = self.enter(x).relu()
        with torch.autocast("cpu", enabled=False):
            h = self.full(h.float()).tanh()
            with torch.autocast("cpu", dtype=BF16):
                h = self.full(h)
            h = torch.cdist(h.float(), self.own) @ self.own
        return self.leave(_Scored.apply(h, self.own))


class _Scored(torch.autograd.Function):
    """A product whose backward is written in 32 bits."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (saved.float() for saved in ctx.saved_tensors)
        return gradient.float() @ weight.T, x.T @ gradient.float()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # TorchDynamo does
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("compiled", "within"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.sweep),
        pytest.param(True, False, marks=pytest.mark.sweep),
    ],
)
def test_products_in_full_precision_within_an_autocast(compiled, within):
    x, found = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), []
    torch.manual_seed(0)
    eager = InFullPrecision()
    model = copy.deepcopy(eager)
    if compiled:
        model = torch.compile(model, backend="remat", options={"budget": "1MiB"})
    else:
        model = remat.rematerialize(model, budget="1MiB", limit_seconds=LIMIT_SECONDS)
    for trained in (model, eager):
        with cast(BF16):
            loss = square(trained(x).float())
            if within:
                loss.backward()
        if not within:
            loss.backward()
        found.append([parameter.grad for parameter in trained.parameters()])
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


def test_a_backward_whose_casts_do_not_fit_is_refused_before_it_starts():
    model = rematerialized(made(Blocks), budget=0.8)
    with cast(BF16):
        loss = square(model(batch()).float())
    with cast(FP16), pytest.raises(remat.BudgetExceeded, match="leave the autocast before"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with cast(BF16):
        square(model(batch()).float()).backward()
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
