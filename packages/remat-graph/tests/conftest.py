"""Random graphs for the tests of this package."""

import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from remat_graph import Block, Graph, Hierarchy, Numerics, Op, Provenance, Stage, Value

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("graph_cases.slicing")
settings.register_profile("remat", deadline=None)
settings.load_profile("remat")


@st.composite
def random_graphs(draw, max_ops=7):
    """Any legal graph, with several outputs, residents, soft order, twins, and one-run ops."""
    count = draw(st.integers(0, max_ops))
    first_backward = draw(st.integers(0, count))
    values = [Value(f"r{i}", draw(st.integers(0, 9))) for i in range(draw(st.integers(0, 2)))]
    resident = [v.name for v in values]
    ops = []
    for i in range(count):
        backward = i >= first_backward
        known = [v.name for v in values]
        earlier = [op.name for op in ops]
        outputs = [Value(f"v{i}.{j}", draw(st.integers(0, 9))) for j in range(draw(_FEW))]
        inputs = draw(_some(known, 3))
        mine = [v for v in values if v.name in inputs and v.name not in resident]
        pairs = list(zip(mine, outputs, strict=False)) if draw(st.booleans()) else []
        for at, (read, _) in enumerate(pairs):
            outputs[at] = replace(outputs[at], size_bytes=read.size_bytes)
        ops.append(
            Op(
                name=f"op{i}",
                inputs=inputs,
                outputs=tuple(v.name for v in outputs),
                time=draw(st.integers(0, 8)) / 4,
                workspace_bytes=draw(st.integers(0, 9)),
                stage=Stage.BACKWARD if backward else Stage.FORWARD,
                twin=draw(st.sampled_from([None, *earlier[:first_backward]])) if backward else None,
                equivalence=draw(st.sampled_from([None, "matmul", "add"])),
                replayable=draw(st.integers(0, 5)) > 0,
                order_after=draw(_some(earlier, 1)),
                overwrites=tuple((read.name, made.name) for read, made in pairs),
                provenance=draw(st.sampled_from([None, Provenance("a.b", "a.py:1")])),
            )
        )
        values += outputs
    return Graph(
        values=tuple(values),
        ops=tuple(ops),
        resident=frozenset(resident),
        results=frozenset(draw(_some([v.name for v in values], 2))),
        boundary=ops[first_backward].name if first_backward < count else None,
    )


_FEW = st.sampled_from([0, 1, 1, 1, 2, 3])


@st.composite
def with_alternatives(draw, graphs):
    """Add alternatives of some ops, and ops that need not run, each right after what it is for."""
    graph = draw(graphs)
    values, ops = list(graph.values), []
    owed, known = sorted(graph.resident), sorted(graph.resident)
    for op in graph.ops:
        ops.append(op)
        owed += op.outputs
        known += op.outputs
        for kind in draw(st.lists(st.sampled_from(["alternative", "optional"]), max_size=2)):
            name = f"{op.name}.{len(ops)}"
            shared = {"time": draw(st.integers(0, 8)) / 4, "stage": op.stage}
            shared["numerics"] = draw(st.sampled_from(list(Numerics)))
            inputs = draw(_some(known, 3))
            if kind == "optional":
                value = Value(f"{name}.v", draw(st.integers(0, 9)))
                values.append(value)
                known.append(value.name)
                ops.append(Op(name, inputs, (value.name,), optional=True, **shared))
            elif op.outputs:
                made = draw(_some(op.outputs, 3)) or op.outputs
                shared |= {"alternative_of": op.name, "replayable": op.replayable}
                ops.append(Op(name, inputs, made, **shared))
    return replace(graph, values=tuple(values), ops=tuple(ops))


def _some(names, most):
    if not names:
        return st.just(())
    return st.lists(st.sampled_from(names), max_size=most, unique=True).map(tuple)


@pytest.fixture(scope="session")
def graphs():
    """Strategy for random graphs, to be drawn from with `st.data()`."""
    return random_graphs


@pytest.fixture(scope="session")
def any_graphs():
    """The same with alternatives."""
    return lambda: random_graphs() | with_alternatives(random_graphs())


def _before(graph, name):
    """The ops on which one depends directly."""
    op = graph.ops[graph.op_index[name]]
    made = {graph.ops[graph.producer[v]].name for v in op.inputs if v in graph.producer}
    return made | set(op.order_after)


def _blocks_of(data, names, prefix="b"):
    """Draw a tree over names in this order."""
    members = []
    while names:
        size = data.draw(st.integers(1, len(names)))
        part, names = names[:size], names[size:]
        if size > 1 and len(prefix) < 4:
            members.append(Block(f"{prefix}{len(members)}", _blocks_of(data, part, prefix + "b")))
        else:
            members += part
    return tuple(members)


def _unique_names(block, counter):
    return Block(
        f"b{next(counter)}",
        tuple(_unique_names(m, counter) if isinstance(m, Block) else m for m in block.members),
    )


@pytest.fixture(scope="session")
def hierarchies(graphs):
    """Draw a random graph cut at random, in another order than its own where one is legal."""

    def draw(data):
        graph = data.draw(graphs(max_ops=9))
        order = [op.name for op in graph.ops[: graph.boundary_index]]
        for _ in range(data.draw(st.integers(0, 3))):  # swap neighbours that do not depend
            i = data.draw(st.integers(0, max(0, len(order) - 2)))
            if i + 1 < len(order) and order[i] not in _before(graph, order[i + 1]):
                order[i], order[i + 1] = order[i + 1], order[i]
        root = _unique_names(Block("", _blocks_of(data, order)), count())
        return Hierarchy(graph, root)

    return draw


@pytest.fixture
def diamond():
    """Forward a -> (b, c) -> loss, and a backward op for each; w is resident."""
    forward, backward = Stage.FORWARD, Stage.BACKWARD
    return Graph(
        values=tuple(
            Value(name, size)
            for name, size in [
                ("w", 100), ("a", 4), ("b", 3), ("stats", 1), ("c", 2), ("loss", 1),
                ("db", 3), ("dc", 2), ("dw", 100),
            ]
        ),
        ops=(
            Op("A", ("w",), ("a",), 1.0, 5, forward, equivalence="linear"),
            Op("B", ("a",), ("b", "stats"), 2.0, 0, forward),
            Op("C", ("a",), ("c",), 3.0, 7, forward, replayable=False, order_after=("B",)),
            Op("L", ("b", "c"), ("loss",), 0.5, 0, forward),
            Op("dL", ("b", "c", "loss"), ("db", "dc"), 0.5, 0, backward, twin="L"),
            Op("dA", ("db", "dc", "stats", "w", "a"), ("dw",), 2.0, 1, backward, twin="A"),
        ),
        resident=frozenset({"w"}),
        results=frozenset({"loss", "dw"}),
        boundary="dL",
    )  # fmt: skip
