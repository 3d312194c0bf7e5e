"""Periods of a graph of TorchDynamo's that do the same are traced in part, as if all were."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from remat_graph import canonical_hash
from remat_graph.torch import capture_region
from remat_graph.torch.capturing import capture as capturing
from remat_graph.torch.capturing import expecting
from remat_graph.torch.capturing.trace import FlatRegion
from remat_graph.torch.repeats import rows
from remat_graph.torch.repeats.periods import Irregular
from remat_graph.torch.tracing.structure import tensors_of_call

WIDTH = 4


@pytest.fixture
def short_rows(monkeypatch):
    """Shorten rows of so few periods, too, which are traced whole sooner."""
    monkeypatch.setattr(rows, "FEWEST_PERIODS", 5)


def found_by_dynamo(model, args, kwargs=None):
    """Give the graph that TorchDynamo makes of a model, and its inputs."""
    found = []

    def backend(graph, inputs):
        found.append((graph, inputs))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args, **(kwargs or {}))
    ((graph, inputs),) = found
    return graph, inputs


def few_and_whole(monkeypatch, graph, inputs):
    """Capture with few periods traced, and with all; say how many rows there were."""
    few = capture_region(graph, inputs, costs="estimate")
    monkeypatch.setattr(capturing, "_traced_in_part", lambda captured: captured(whole=True))
    whole = capture_region(graph, inputs, costs="estimate")
    assert not whole._repeats
    return few, whole


def assert_same(few, whole):
    for missing in (few.missing, frozenset()):
        one, other = few.variant(missing), whole.variant(missing)
        assert canonical_hash(one.graph) == canonical_hash(other.graph)
        assert one.program.inputs == other.program.inputs
        assert one.program.gradients.keys() == other.program.gradients.keys()
        assert set(one.differentiable) == set(other.differentiable)
        assert [op.provenance for op in one.graph.ops] == [op.provenance for op in other.graph.ops]
        forward = [op for op in one.program.order if op not in one.program.backward_ops]
        assert forward == [op for op in few.program.order if op not in few.program.backward_ops]


def language(name, **config):
    made = getattr(transformers, f"{name}Config")(
        vocab_size=32, bos_token_id=None, eos_token_id=None, use_cache=False, **config
    )
    tokens = torch.zeros(2, 8, dtype=torch.long)
    model = transformers.AutoModelForCausalLM.from_config(made).train()
    model.loss_type = "ForCausalLM"  # transformers derives none from a name, and warns
    return model, (), {"input_ids": tokens, "labels": tokens}


def gpt2():
    return language("GPT2", n_embd=16, n_layer=6, n_head=2, n_positions=8)


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.number = number

    def forward(self, x, memory):
        return x + self.drop(self.linear(self.norm(x)).relu())


class InTurn(Block):
    def forward(self, x, memory):
        made = super().forward(x, memory)
        return made * 0.5 if self.number % 2 else made


class OneUnlike(Block):
    def forward(self, x, memory):
        made = super().forward(x, memory)
        return made * (0.5 if self.number == 6 else 2.0)


class ReadsMemory(Block):
    def forward(self, x, memory):
        return super().forward(x, memory) + memory


class ReadsPlace(Block):
    def forward(self, x, memory, place):
        return super().forward(x, memory) + place


class Normalised(Block):
    def __init__(self, number):
        super().__init__(number)
        self.norm = nn.BatchNorm1d(WIDTH)


class Counts(Block):
    def forward(self, x, memory):
        self.seen += x.detach().sum(0)
        return super().forward(x, memory)


class InPlace(Block):
    def forward(self, x, memory):
        return super().forward(x, memory).clone().mul_(2.0).tanh_()


class InOtherOrder(Block):
    """Reads its own in another order in two blocks, as often as before."""

    def __init__(self, number):
        super().__init__(number)
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH)) for _ in "ab")

    def forward(self, x, memory):
        x = torch.tanh(x * self.a + self.b)
        one, two = (self.b, self.a) if self.number in (6, 7) else (self.a, self.b)
        return x * one + two


class Conjugates(Block):
    def __init__(self, number):
        super().__init__(number)
        other = torch.randn(WIDTH, dtype=torch.cfloat)
        self.register_buffer("other", other.conj() if number in (5, 6) else other)

    def forward(self, x, memory):
        return super().forward(x, memory) + (self.other * 2).imag


class SignOfNan(Block):
    def forward(self, x, memory):
        sign = -float("nan") if self.number in (6, 7) else float("nan")
        return super().forward(x, memory) + torch.copysign(x, sign)


class ReadsAhead(nn.Module):
    """What was made for each block before the first, at the distances of the blocks."""

    def __init__(self, chosen=(6, 7, 9)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(14))
        self.chosen = chosen

    def forward(self, x):
        t = x.abs()
        ms = [t[:, 1 if i in self.chosen else 0].unsqueeze(1) for i in range(14)]
        for layer, m in zip(self.layers, ms, strict=True):
            x = layer(x)
            x = x * m
        return x.square().mean()


class Aside(nn.Module):
    """Two outputs, of which the second does not depend on the row."""

    def __init__(self):
        super().__init__()
        self.row, self.aside = stack(Block, count=8)[0], nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.row(x)[1], self.aside(x)


class Stack(nn.Module):
    def __init__(self, make=Block, count=14, *, returns_all=False):
        super().__init__()
        self.blocks = nn.ModuleList(make(number) for number in range(count))
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.returns_all = returns_all

    def forward(self, x):
        memory, states = self.enter(x), []
        others = {"place": x.sin()} if isinstance(self.blocks[0], ReadsPlace) else {}
        for block in self.blocks:
            x = block(x, memory=memory, **others)
            states.append(x)
        return self.head(x).sum(), *states[0 if self.returns_all else -1 :]


def stack(make, **options):
    return Stack(make, **options), (torch.randn(3, WIDTH),)


def tied():
    model, args = stack(Block)
    for block in model.blocks[1:]:
        block.linear.weight = model.blocks[0].linear.weight
    return model, args


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(gpt2, marks=pytest.mark.sweep),
        pytest.param(lambda: stack(InTurn, count=14), marks=pytest.mark.sweep),
        pytest.param(lambda: stack(ReadsPlace, count=8), marks=pytest.mark.sweep),
        lambda: stack(InPlace, count=8),
    ],
    ids=["gpt2", "in turn", "reads what was before", "in place"],
)
def test_the_graph_is_that_of_tracing_every_period(monkeypatch, make):
    few, whole = few_and_whole(monkeypatch, *found_by_dynamo(*make()))
    assert len(few._repeats) == 1
    assert len(few._repeats[0].blocks) >= 5
    assert_same(few, whole)


@pytest.mark.parametrize(
    "make",
    [
        lambda: stack(OneUnlike, count=12),
        lambda: stack(ReadsMemory),
        lambda: stack(Normalised),
        lambda: stack(Counts),
        lambda: stack(Block, count=7),
        lambda: stack(Block, returns_all=True),
        tied,
        lambda: stack(InOtherOrder),
        lambda: stack(Conjugates, count=12),
        lambda: stack(SignOfNan),
        lambda: (ReadsAhead(), (torch.randn(3, WIDTH),)),
    ],
    ids=[
        "one unlike",
        "memory",
        "statistics",
        "counts",
        "few",
        "returned",
        "tied",
        "other order",
        "conjugates",
        "sign of NaN",
        "reads ahead",
    ],
)
def test_what_does_not_repeat_is_traced_at_once(make):
    graph, inputs = found_by_dynamo(*make())
    assert not FlatRegion(graph, inputs, tensors_of_call(inputs)[0], whole=False).repeats


@pytest.mark.sweep
@pytest.mark.usefixtures("short_rows")
def test_two_rows_of_a_graph_are_both_found(monkeypatch):
    model = nn.Sequential(stack(Block)[0].blocks[0].linear, nn.Tanh())
    rows = [nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), act()) for _ in range(7)))
            for act in (nn.Tanh, nn.Sigmoid)]  # fmt: skip
    graph, inputs = found_by_dynamo(nn.Sequential(model, *rows), (torch.randn(3, WIDTH),))
    few, whole = few_and_whole(monkeypatch, graph, inputs)
    assert len(few._repeats) == 2
    assert_same(few, whole)


@pytest.mark.usefixtures("short_rows")
def test_a_backward_that_does_not_pass_the_row(monkeypatch):
    few, whole = few_and_whole(monkeypatch, *found_by_dynamo(Aside(), (torch.randn(3, WIDTH),)))
    assert len(few._repeats) == 1
    for missing in (frozenset({0}), frozenset({1})):
        one, other = few.variant(missing), whole.variant(missing)
        assert canonical_hash(one.graph) == canonical_hash(other.graph)


@pytest.mark.usefixtures("short_rows")
def test_a_variant_that_few_periods_do_not_tell_is_traced_whole(monkeypatch):
    few = capture_region(*found_by_dynamo(Aside(), (torch.randn(3, WIDTH),)), costs="estimate")
    unroll = expecting.unroll

    def refuses(program, repeats):
        if repeats:
            raise Irregular("not told")
        return unroll(program, repeats)

    monkeypatch.setattr(expecting, "unroll", refuses)
    told = few.variant(frozenset({0}))
    assert not told.dry
    assert len(told.graph.ops) < len(few.graph.ops)
