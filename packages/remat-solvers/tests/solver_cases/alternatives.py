"""Small training graphs in which values have several makers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle

from hypothesis import strategies as st

from remat_graph import Graph, Numerics, Op, Stage, Value
from solver_cases.random_graphs import trainings


@st.composite
def trainings_with_alternatives(draw, most_depth: int = 3, most: int = 3) -> Graph:
    """Draw a chain and its mirror, with alternatives of the kinds that there are in practice.

    Two halves for a backward op, a copy that is packed and unpacked again, in the backward half
    alone or in both, a backward op that reads the output in place of the input, or a packed copy,
    and a faster algorithm with a workspace.
    """
    graph = draw(trainings(most_depth))
    values, ops = list(graph.values), list(graph.ops)
    left = most
    for op in graph.ops:
        if left == 0:
            break
        kind = draw(st.sampled_from(_KINDS))
        if kind is not None:
            added = kind(draw, graph, op)
            at = ops.index(op) + 1
            values += added[0]
            ops[at:at] = added[1]
            left -= bool(added[1])
    once = {op.name for op in graph.ops if draw(st.integers(0, 5)) == 0}
    ops = [
        replace(op, replayable=False) if once & {op.name, op.alternative_of} else op for op in ops
    ]
    late = [op for op in ops if op.name.startswith("unpack") and draw(st.booleans())]
    ops = [op for op in ops if op not in late]
    at = [op.name for op in ops].index(graph.boundary) + 1
    after = (graph.boundary,)
    ops[at:at] = [replace(op, stage=Stage.BACKWARD, order_after=after) for op in late]
    return replace(graph, values=tuple(values), ops=tuple(ops))


def packable(depth: int = 6) -> Graph:
    """A chain whose backward half can do with a mask of a tenth; each mask takes little time."""
    values, ops = [Value("x", 1)], []
    before = "x"
    for i in range(depth):
        values += [Value(f"a{i}", 100), Value(f"m{i}", 10)]
        ops.append(Op(f"f{i}", (before,), (f"a{i}",), 5.0))
        ops.append(Op(f"mask{i}", (f"a{i}",), (f"m{i}",), 0.1, optional=True))
        before = f"a{i}"
    grad = before
    for i in reversed(range(depth)):
        values.append(Value(f"g{i}", 100))
        read = dict.fromkeys((f"a{i}", grad))
        ops.append(Op(f"b{i}", tuple(read), (f"g{i}",), 5.0, stage=Stage.BACKWARD))
        if len(read) == 2:
            by_mask = replace(ops[-1], name=f"b{i} by mask", inputs=(f"m{i}", grad))
            ops.append(replace(by_mask, alternative_of=f"b{i}"))
        grad = f"g{i}"
    results = frozenset({grad})
    return Graph(tuple(values), tuple(ops), frozenset({"x"}), results, f"b{depth - 1}")


def convolutions(depth: int = 9) -> Graph:
    """Draw the gradients of a VGG-like net: sizes halve, weights double, backwards have halves.

    What the halves need besides is what makes the backward of the first layers the tightest moment,
    where the gradients of all weights are held already, unless some are made again at the end.
    """
    values, ops = [Value("x", 1)], []
    before = "x"
    for i in range(depth):
        size = 4096 >> (i // 2)
        values += [Value(f"c{i}", size), Value(f"a{i}", size), Value(f"s{i}", size // 32)]
        ops.append(Op(f"conv{i}", (before,), (f"c{i}",), 800.0, size, equivalence=f"c{i // 2}"))
        pairs = ((f"c{i}", f"a{i}"),)
        ops.append(Op(f"relu{i}", (f"c{i}",), (f"a{i}",), 12.0 + size / 30, overwrites=pairs))
        ops.append(Op(f"signs{i}", (f"a{i}",), (f"s{i}",), 20.0 + size / 10, optional=True))
        before = f"a{i}"
    values.append(Value("loss", 1))
    ops.append(Op("loss", (before,), ("loss",), 1.0, replayable=False))
    grad, results = "loss", {"loss"}
    backward = partial(Op, stage=Stage.BACKWARD)
    for i in reversed(range(depth)):
        size, weight = 4096 >> (i // 2), 40 << min(i, 5)
        values += [Value(f"r{i}", size), Value(f"w{i}", weight)]
        ops.append(backward(f"relu{i}'", (grad, f"a{i}"), (f"r{i}",), 12.0 + size / 20))
        by_signs = replace(ops[-1], name=f"relu{i}' by signs", inputs=(grad, f"s{i}"))
        ops.append(replace(by_signs, alternative_of=f"relu{i}'", time=60.0 + size / 15))
        read = (f"r{i}",) if i == 0 else (f"r{i}", f"a{i - 1}")
        makes = (f"w{i}",) if i == 0 else (f"g{i}", f"w{i}")
        whole = backward(f"conv{i}'", read, makes, 1600.0, 2 * size, equivalence=f"b{i // 2}")
        ops.append(whole)
        if i:
            values.append(Value(f"g{i}", 4096 >> ((i - 1) // 2)))
            for half, made, reads, needs in (("g", 0, read[:1], size), ("w", 1, read, 2 * size)):
                part = replace(whole, name=f"conv{i}'{half}", outputs=(makes[made],), inputs=reads)
                part = replace(part, alternative_of=whole.name, equivalence=f"{half}{i // 2}")
                ops.append(replace(part, time=810.0, workspace_bytes=needs))
        results.add(f"w{i}")
        grad = f"g{i}"
    return Graph(
        tuple(values), tuple(ops), frozenset({"x"}), frozenset(results), f"relu{depth - 1}'"
    )


def with_kinds(graph: Graph, kinds: list[Numerics]) -> Graph:
    """Say of what need not run, in turn, how exact it is."""
    turn = cycle(kinds)
    ops = [op if op.owed else replace(op, numerics=next(turn)) for op in graph.ops]
    return replace(graph, ops=tuple(ops))


Added = tuple[list[Value], list[Op]]


def _halves(draw, graph: Graph, op: Op) -> Added:
    if len(op.outputs) < 2:
        return [], []
    halves = [
        _other(draw, op, f"{op.name}/{v}", outputs=(v,), inputs=op.inputs) for v in op.outputs
    ]
    return [], halves


def _packed(draw, graph: Graph, op: Op) -> Added:
    if op.stage is Stage.BACKWARD:
        return [], []
    v = op.outputs[0]
    copy = Value(f"{v}@packed", draw(st.integers(0, graph.value_by_name[v].size_bytes)))
    time = float(draw(st.integers(0, 2)))
    pack = Op(f"pack {v}", (v,), (copy.name,), time, optional=True)
    return [copy], [pack, _other(draw, op, f"unpack {v}", inputs=(copy.name,), outputs=(v,))]


def _by_output(draw, graph: Graph, op: Op) -> Added:
    if op.stage is Stage.FORWARD:
        return [], []
    others = [f"a{i}" for i in range(4) if f"a{i}" in graph.value_by_name]
    inputs = tuple(dict.fromkeys((draw(st.sampled_from(others)), *op.inputs[1:])))
    return [], [_other(draw, op, f"{op.name} by another", inputs=inputs, outputs=op.outputs)]


def _faster(draw, graph: Graph, op: Op) -> Added:
    more = draw(st.integers(0, 4))
    return [], [_other(draw, op, f"{op.name} fast", workspace_bytes=more)]


def _other(draw, op: Op, name: str, **changes) -> Op:
    """Another op that makes some of the same, of another time, whose overwriting is kept."""
    changed = replace(op, overwrites=(), **changes)
    pairs = tuple(
        (read, made)
        for read, made in op.overwrites
        if read in changed.inputs and made in changed.outputs
    )
    time = float(draw(st.integers(0, 9)))
    return replace(changed, name=name, alternative_of=op.name, time=time, overwrites=pairs)


def _by_packed(draw, graph: Graph, op: Op) -> Added:
    """What reads a packed copy in place of the value; the copy is made whenever it is wanted."""
    if op.stage is Stage.FORWARD or not op.inputs[0].startswith("a"):
        return [], []
    v = op.inputs[0]
    copy = Value(f"{v}@mask", draw(st.integers(0, graph.value_by_name[v].size_bytes)))
    time = float(draw(st.integers(0, 2)))
    pack = Op(f"mask {v}", (v,), (copy.name,), time, stage=Stage.BACKWARD, optional=True)
    other = _other(draw, op, f"{op.name} by mask", inputs=(copy.name, *op.inputs[1:]))
    return [copy], [pack, other]


_KINDS = [None, _halves, _packed, _by_output, _faster, _by_packed]
