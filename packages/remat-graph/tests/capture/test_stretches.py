"""Stretches of traced models: what they take in, why they end, and slices against the whole."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from remat_graph.torch import CaptureError, Variable, capture
from remat_graph.torch.operators import operator_of
from remat_graph.torch.program import LOSS
from remat_graph.torch.slices.placement import SUMMED, WHOLE, Sliced, Summed
from remat_graph.torch.ways.stretches import stretch_from

aten = torch.ops.aten
BATCH, TOKENS, WIDTH, WORDS = 4, 6, 8, 30


class Forward(nn.Module):
    """A module with the given forward and parts."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.run(self, *args)


def tokens():
    return torch.rand(BATCH, TOKENS, WIDTH)


def words():
    return torch.randint(WORDS, (BATCH, TOKENS))


def head_and_loss(**options):
    def forward(m, x, y):
        return functional.cross_entropy(m.head(x).view(-1, WORDS), y.view(-1), **options)

    return Forward(forward, head=nn.Linear(WIDTH, WORDS, bias=False)), (tokens(), words())


def smoothed():
    def forward(m, x, y, weight):
        scores = m.head(x).flatten(0, 1)
        return functional.cross_entropy(scores, y.flatten(), weight, label_smoothing=0.1)

    return Forward(forward, head=nn.Linear(WIDTH, WORDS)), (tokens(), words(), torch.rand(WORDS))


def block(m, x):
    x = x + m.down(functional.gelu(m.up(m.norm(x))))
    return x + m.gated(functional.silu(m.gate(x)) * m.value(m.rms(x)))


def attention(m, x):
    q, k, v = (
        part.view(BATCH, TOKENS, 2, WIDTH // 2).transpose(1, 2)
        for part in m.qkv(x).split(WIDTH, -1)
    )
    made = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.out(made.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))


def model(m, x, y):
    x = block(m, m.table(x) + m.places)
    x = x + attention(m, x)
    x = m.last(x)
    return functional.cross_entropy(30 * torch.tanh(m.head(x) / 30).flatten(0, 1), y.flatten())


def parts():
    return {
        "norm": nn.LayerNorm(WIDTH),
        "rms": nn.RMSNorm(WIDTH),
        "last": nn.LayerNorm(WIDTH),
        "up": nn.Linear(WIDTH, 12),
        "down": nn.Linear(12, WIDTH),
        "gate": nn.Linear(WIDTH, 10),
        "value": nn.Linear(WIDTH, 10, bias=False),
        "gated": nn.Linear(10, WIDTH),
        "qkv": nn.Linear(WIDTH, 3 * WIDTH),
        "out": nn.Linear(WIDTH, WIDTH),
        "table": nn.Embedding(WORDS, WIDTH),
        "places": nn.Parameter(torch.rand(TOKENS, WIDTH)),
        "head": nn.Linear(WIDTH, WORDS),
    }


def images():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 3),
    ), (torch.rand(BATCH, 3, 12, 12),)  # fmt: skip


def tied():
    def forward(m, x, y):
        made = m.table(x)
        return functional.cross_entropy(
            made.flatten(0, 1) @ m.table.weight.T, y.flatten(), reduction="sum"
        )

    return Forward(forward, table=nn.Embedding(WORDS, WIDTH)), (words(), words())


MODELS = {
    "head": head_and_loss,
    "ignored": lambda: head_and_loss(ignore_index=3, reduction="sum"),
    "smoothed": smoothed,
    "block": lambda: (Forward(block, **parts()), (tokens(),)),
    "attention": lambda: (Forward(attention, **parts()), (tokens(),)),
    "model": lambda: (Forward(model, **parts()), (words(), words())),
    "images": images,
    "tied": tied,
    "huber": lambda: (
        Forward(lambda m, x: functional.huber_loss(m.layer(x), x), layer=nn.Linear(WIDTH, WIDTH)),
        (tokens(),),
    ),
}


@functools.cache
def traced(name):
    """The program of a model in double precision, and what each of its variables is in a step."""
    torch.manual_seed(0)
    module, args = MODELS[name]()
    module.double()
    args = [arg.double() if arg.is_floating_point() else arg for arg in args]
    program = capture(module, args, costs="estimate").program
    given = dict(module.named_parameters()) | dict(module.named_buffers())
    values = dict(program.constants)
    for item in program.inputs:
        values[item.variable] = given[item.key] if isinstance(item.key, str) else args[item.key]
    with torch.no_grad():
        for op in program.order:
            if op == LOSS:
                for tangent, position in program.tangents.items():
                    values[tangent] = torch.rand_like(
                        value_of(program, values, program.returned[position])
                    )
            elif op in program.calls:
                run(program, values, program.calls[op])
        for view in program.views:
            value_of(program, values, view)
    return program, values


def value_of(program, values, name):
    if name not in values:
        run(program, values, program.views[name])
    return values[name]


def run(program, values, call):
    args, kwargs = pytree.tree_map_only(
        Variable, lambda item: value_of(program, values, item.name), (call.args, dict(call.kwargs))
    )
    made = (operator_of(call.target).runs_as or call.target)(*args, **kwargs)
    values.update(zip(call.results, made if call.sequence else [made], strict=True))


def check(program, values, stretch, cuts):
    """Run a stretch in slices, and compare what it gives with the whole."""
    body = stretch.body
    with torch.no_grad():
        outputs = body.run([values[name] for name in body.body.inputs], cuts)
    for name, made in zip(body.body.outputs, outputs, strict=True):
        whole = values[name]
        assert (made.shape, made.stride(), made.dtype) == (whole.shape, whole.stride(), whole.dtype)
        scale = max(1.0, float(whole.double().abs().max()))
        torch.testing.assert_close(made, whole, rtol=1e-12, atol=1e-12 * scale)


def is_convex(program, stretch):
    """Whether nothing outside reads, however late, what leaves and is read again inside."""
    own = set(stretch.ops) - stretch.again
    tainted = set()
    for op in program.order:
        call = program.calls.get(op)
        reads = program.returned if op == LOSS else call.reads if call is not None else ()
        reads = {program.storage[name] for name in reads if name in program.storage}
        behind = not reads.isdisjoint(tainted)
        if op in own:
            if behind:
                return False
            continue
        made = {program.storage[n] for o in own for n in program.calls[o].results if n is not None}
        if behind or not reads.isdisjoint(made):
            results = program.tangents if op == LOSS else call.results if call is not None else ()
            tainted |= {program.storage[name] for name in results if name is not None}
    return True


def divisors(number):
    return [each for each in range(1, number + 1) if number % each == 0]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_random_stretches_give_what_the_whole_gives(name, data):
    program, values = traced(name)
    seed = data.draw(
        st.sampled_from([n for n, f in program.facts.items() if max(f.shape, default=1) > 1])
    )
    shape = program.facts[seed].shape
    axis = data.draw(st.sampled_from([a for a, size in enumerate(shape) if size > 1]))
    place = Sliced(axis, data.draw(st.integers(0, axis)))
    units = data.draw(st.sampled_from(divisors(place.length(shape))))
    again = data.draw(st.sampled_from([(), forward_ops(program)]))
    ops = program.calls if data.draw(st.booleans()) and not again else None
    stretch = stretch_from(program, seed, place, units=units, ops=ops, again=again)
    inner = data.draw(st.sets(st.integers(1, max(1, units - 1)), max_size=4))
    check(program, values, stretch, [0, *sorted(cut for cut in inner if cut < units), units])
    assert is_convex(program, stretch)
    touched = {name for name, at in stretch.places.items() if at != WHOLE}
    for op, call in program.calls.items():
        if op not in stretch.ops and op not in again and not touched.isdisjoint(call.reads):
            assert op in stretch.ends


def made_by(program, target, at=0):
    calls = [call for call in program.calls.values() if call.target is target]
    return calls[at].results[0]


def forward_ops(program):
    return [op for op in program.calls if op not in program.backward_ops]


@pytest.mark.parametrize("units", [BATCH, BATCH * TOKENS, BATCH * TOKENS // 3])
def test_head_and_loss_are_one_stretch_in_the_forward(units):
    program, _ = traced("head")
    logits = made_by(program, aten._log_softmax.default)
    stretch = stretch_from(program, logits, Sliced(0), units=units)
    assert set(stretch.ops) == set(forward_ops(program))
    loss, total = next(
        call.results for call in program.calls.values() if "nll_loss_forward" in call.name
    )
    assert stretch.places[loss] == Summed(over=1)
    assert stretch.places[total] == SUMMED
    assert "loss" in stretch.ends


@pytest.mark.parametrize("units", [BATCH, BATCH * TOKENS])
def test_the_backward_of_head_and_loss_makes_the_logits_again_and_lets_none_out(units):
    program, values = traced("head")
    logits = made_by(program, aten._log_softmax.default)
    again = forward_ops(program)[:2]
    stretch = stretch_from(program, logits, Sliced(0), units=units, again=again)
    assert stretch.again == set(again)
    assert set(stretch.ops) == stretch.again | program.backward_ops - {LOSS}
    crossing = (*stretch.body.body.inputs, *stretch.body.body.outputs)
    assert BATCH * TOKENS * WORDS not in [math.prod(program.facts[n].shape) for n in crossing]
    check(program, values, stretch, [0, 1, 3, units])


def test_an_mlp_and_its_backward_run_by_tokens_of_all_sentences():
    program, values = traced("block")
    units = BATCH * TOKENS
    hidden = made_by(program, aten.gelu.default)
    forward = stretch_from(program, hidden, Sliced(1, joined=1))
    assert forward.body.units == units
    assert set(forward.ops) == set(forward_ops(program))
    again = stretch_from(program, hidden, Sliced(1, joined=1), again=forward_ops(program))
    assert program.backward_ops - {LOSS} <= set(again.ops)
    widest = max(math.prod(program.facts[name].shape) for name in again.body.body.outputs)
    assert widest <= BATCH * TOKENS * WIDTH
    for stretch in (forward, again):
        check(program, values, stretch, [0, 5, 7, 20, units])


def test_tokens_of_a_model_end_where_attention_looks_across_them():
    program, _ = traced("attention")
    seed = made_by(program, aten.addmm.default)
    ops = {program.calls[op].name for op in stretch_from(program, seed, Sliced(0), units=BATCH).ops}
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in ops
    queries = next(call for call in program.calls.values() if "flash" in call.name).reads[0]
    along = stretch_from(program, queries, Sliced(2))
    assert not any("flash" in program.calls[op].name for op in along.ops)
    assert any("flash" in reason for reason in along.ends.values())


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (nn.Dropout(0.5), "draws"),
        (nn.BatchNorm1d(WIDTH), "cannot be cut"),
        (Forward(lambda m, x: x.cumsum(0)), "has no rule for"),
        (Forward(lambda m, x: x[x[:, 0].argsort()]), "cannot be cut"),
    ],
    ids=["dropout", "batch norm", "scan", "sort"],
)
def test_what_may_not_be_cut_ends_a_stretch_and_is_named(middle, reason):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH))
    program = capture(module, (torch.rand(BATCH, WIDTH),), costs="estimate").program
    first = made_by(program, aten.addmm.default)
    stretch = stretch_from(program, first, Sliced(0))
    assert all(program.calls[op].target is aten.addmm.default for op in stretch.ops)
    assert len(stretch.ops) == 1
    assert any(reason in each for each in stretch.ends.values())


def test_a_sum_around_what_cannot_be_cut_stays_out():
    """The residual is beside the first layer, but a scan lies between."""

    def forward(m, x):
        x = torch.tanh(x * 2)
        return x + x.cumsum(0)

    program = capture(
        Forward(forward, layer=nn.Linear(2, 2)),
        (torch.rand(BATCH, WIDTH, requires_grad=True),),
        costs="estimate",
    ).program
    stretch = stretch_from(program, made_by(program, aten.tanh.default), Sliced(0))
    add = next(op for op, call in program.calls.items() if call.target is aten.add.Tensor)
    assert add not in stretch.ops
    assert "lies between" in stretch.ends[add]


def test_weights_stay_whole_and_their_gradients_are_summed():
    program, _ = traced("images")
    first = made_by(program, aten.convolution.default)
    stretch = stretch_from(program, first, Sliced(0), again=forward_ops(program))
    for item in program.inputs:
        if item.kind == "parameter" and item.variable in stretch.places:
            assert stretch.places[item.variable] == WHOLE
    gradients = [
        place for name, place in stretch.places.items() if name in program.gradients.values()
    ]
    assert set(gradients) <= {SUMMED, Sliced(0)}
    assert SUMMED in gradients


def test_ops_that_may_be_inside_can_be_named():
    program, _ = traced("head")
    logits = made_by(program, aten._log_softmax.default)
    softmax = next(op for op, c in program.calls.items() if c.target is aten._log_softmax.default)
    stretch = stretch_from(program, logits, Sliced(0), ops=[softmax])
    assert stretch.ops == (softmax,)
    assert "not among" in " ".join(stretch.ends.values())


@pytest.mark.parametrize(
    ("seed", "place", "options", "message"),
    [
        ("nothing", Sliced(0), {}, "no tensor 'nothing'"),
        (None, Sliced(5), {}, "axis 5"),
        (None, Sliced(0), {"units": 5}, "no 5 equal parts"),
        (None, Sliced(0), {"again": ["nll_loss_backward"]}, "not of the forward half"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(seed, place, options, message):
    program, _ = traced("head")
    with pytest.raises(CaptureError, match=message):
        stretch_from(program, seed or made_by(program, aten.mm.default), place, **options)
