"""Blocks that do the same are traced once, and the graph is that of tracing all of them."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from remat_graph import canonical_hash
from remat_graph.torch import capture
from remat_graph.torch.capturing import capture as capturing
from remat_graph.torch.capturing import expecting
from remat_graph.torch.capturing import trace as tracing
from remat_graph.torch.repeats import blocks
from remat_graph.torch.repeats.periods import Irregular

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
}
QUIET = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}


@pytest.fixture(autouse=True)
def _short_rows(monkeypatch):
    """Pass over blocks of so short rows, too, which are traced whole sooner."""
    monkeypatch.setattr(blocks, "FEWEST_PERIODS", 5)


def language(name, **config):
    made = getattr(transformers, f"{name}Config")(vocab_size=32, **QUIET, **config)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    return model.train(), {"input_ids": tokens, "labels": tokens}


def llama():
    return language("Llama", **SMALL, num_key_value_heads=1)


def both(monkeypatch, model, kwargs, args=()):
    """Capture with few blocks traced, and with all."""
    few = capture(model, args, kwargs, costs="estimate")
    trace = capturing.trace
    monkeypatch.setattr(
        capturing, "trace", lambda *given, **named: trace(*given, **(named | {"whole": True}))
    )
    return few, capture(model, args, kwargs, costs="estimate")


def assert_same(few, whole):
    assert canonical_hash(few.graph) == canonical_hash(whole.graph)
    for one, other in zip(few.graph.ops, whole.graph.ops, strict=True):
        assert one.provenance == other.provenance
    assert few.program.inputs == whole.program.inputs
    assert few.program.gradients.keys() == whole.program.gradients.keys()
    assert set(few.differentiable) == set(whole.differentiable)


@pytest.mark.sweep
def test_the_graph_is_that_of_tracing_every_block(monkeypatch):
    few, whole = both(monkeypatch, *llama())
    assert len(few._repeats) == 1
    assert_same(few, whole)


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()


class Stack(nn.Module):
    def __init__(self, make=Block, count=7):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Scaled(Block):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


class Counting(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class OwnBackward(Scaled):
    def forward(self, x):
        return Doubled.apply(Block.forward(self, x), self.scale)


class Hooked(Scaled):
    def forward(self, x):
        made = Block.forward(self, x)
        made.register_hook(lambda gradient: gradient * self.scale)
        return made


class Numbered(Scaled):
    def forward(self, x):
        return Block.forward(self, x) * torch.tensor(self.scale).item()


class AllStates(Stack):
    def forward(self, x):
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.head(torch.stack(states).sum(0))


def stack_of(make, *, whole_numbers=False):
    stack = Stack(make)
    for block, scale in zip(stack.blocks, range(7), strict=True):
        block.scale = scale if whole_numbers else float(scale)
    return stack


def sharing_a_parameter():
    stack = Stack()
    for block in stack.blocks:
        block.linear.weight = stack.blocks[0].linear.weight
    return stack


def called_twice():
    stack = Stack()
    stack.blocks = nn.ModuleList([*stack.blocks[:3], *stack.blocks[:3]])
    return stack


NOT_THE_SAME = {
    "other constants": lambda: stack_of(Scaled),
    "other whole numbers": lambda: stack_of(Scaled, whole_numbers=True),
    "numbers out of tensors": lambda: stack_of(Numbered, whole_numbers=True),
    "a state": lambda: Stack(Counting),
    "a backward of its own": lambda: stack_of(OwnBackward),
    "hooks": lambda: stack_of(Hooked),
    "states of all blocks are read": AllStates,
    "blocks that stand twice": called_twice,
}


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_blocks_that_do_not_do_the_same_are_all_traced(name):
    captured = capture(NOT_THE_SAME[name](), (torch.ones(2, 4),), costs="estimate")
    assert captured._repeats == ()


def test_what_was_noted_of_blocks_that_do_not_repeat_leaves_nothing(monkeypatch):
    few, whole = both(monkeypatch, Stack(Counting), {}, (torch.ones(2, 4),))
    assert few.graph == whole.graph


def test_blocks_may_share_a_parameter(monkeypatch):
    few, whole = both(monkeypatch, sharing_a_parameter(), {}, (torch.ones(2, 4),))
    assert len(few._repeats) == 1
    assert_same(few, whole)


def counted(monkeypatch):
    """Count the searches for blocks that repeat."""
    found, search = [], tracing.find_repeats
    monkeypatch.setattr(tracing, "find_repeats", lambda *a: found.append(search(*a)) or found[-1])
    return found


@pytest.mark.sweep
def test_a_forward_that_is_traced_twice_is_noted_once(monkeypatch):
    found = counted(monkeypatch)
    model, call = llama()  # whose mask depends on data until it is exported
    assert capture(model, (), call, costs="estimate")._repeats
    assert len(found) == 1


def test_blocks_with_other_settings_are_not_noted(monkeypatch):
    found = counted(monkeypatch)
    capture(stack_of(Scaled), (torch.ones(2, 4),), costs="estimate")
    assert found == []


def test_notes_end_where_the_first_blocks_do_not_repeat():
    calls = []

    class Telling(Scaled):
        def forward(self, x):
            calls.append(self.scale)
            return super().forward(x)

    capture(stack_of(Telling, whole_numbers=True), (torch.ones(2, 4),), costs="estimate")
    assert calls.count(0) == calls.count(6) + 1


@pytest.mark.sweep
def test_kinds_of_blocks_that_alternate_repeat_together(monkeypatch):
    class Smooth(Block):
        def forward(self, x):
            return x + self.linear(x).tanh()

    model = Stack(count=0)
    model.blocks = nn.ModuleList((Block, Smooth)[index % 2]() for index in range(14))
    few, whole = both(monkeypatch, model, {}, (torch.ones(2, 4),))
    assert [len(repeat.blocks[0]) for repeat in few._repeats] == [2]
    assert_same(few, whole)


def test_a_value_that_all_blocks_share_gets_the_gradients_of_all(monkeypatch):
    class Shared(Stack):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            scale = self.scale.exp()
            for block in self.blocks:
                x = block(x, scale)
            return self.head(x)

    class Scaling(Block):
        def forward(self, x, scale):
            return super().forward(x) * scale

    model = Shared()
    model.blocks = nn.ModuleList(Scaling() for _ in range(7))
    few, whole = both(monkeypatch, model, {}, (torch.ones(2, 4),))
    assert len(few._repeats) == 1
    assert_same(few, whole)


class Holding(Block):
    """With a buffer and a tensor that is neither buffer nor parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(4))
        self.table = torch.ones(4)

    def forward(self, x):
        return super().forward(x) * self.table + self.shift


@pytest.mark.sweep
def test_inputs_of_blocks_that_are_not_traced_stand_where_they_would(monkeypatch):
    few, whole = both(monkeypatch, Stack(Holding), {}, (torch.ones(2, 4),))
    assert len(few._repeats) == 1
    assert_same(few, whole)


@pytest.mark.sweep
def test_another_name_of_what_a_block_has_changes_nothing(monkeypatch):
    model = Stack()
    model.spare = nn.Linear(4, 4)
    model.spare.weight = model.blocks[5].linear.weight
    few, whole = both(monkeypatch, model, {}, (torch.ones(2, 4),))
    assert len(few._repeats) == 1
    assert_same(few, whole)


def test_a_variant_is_made_once_and_is_that_of_tracing_every_block(monkeypatch):
    class Two(Stack):
        def forward(self, x):
            made = super().forward(x)
            return made, made.sum()

    few, whole = both(monkeypatch, Two(), {}, (torch.ones(2, 4),))
    variant = few.variant(frozenset({0}))
    assert few._repeats
    assert few.with_released_outputs(frozenset({1})).variant(frozenset({0})) is variant
    assert_same(variant, whole.variant(frozenset({0})))


def test_the_model_is_left_as_it_was():
    model = Stack()
    before = [dict(part.__dict__) for part in model.modules()]
    assert capture(model, (torch.ones(2, 4),), costs="estimate")._repeats
    assert [dict(part.__dict__) for part in model.modules()] == before


@pytest.mark.sweep
def test_an_irregular_program_is_traced_whole(monkeypatch):
    model, call = Stack(), (torch.ones(2, 4),)
    whole = both(monkeypatch, model, {}, call)[1]
    monkeypatch.undo()
    monkeypatch.setattr(blocks, "FEWEST_PERIODS", 5)
    unroll = expecting.unroll

    def refusing(program, repeats):
        if repeats:
            raise Irregular("not so")
        return unroll(program, repeats)

    monkeypatch.setattr(expecting, "unroll", refusing)
    assert capture(model, call, costs="estimate").graph == whole.graph
