"""Hypothesis strategies for graphs at the edge of what a solver is given, and for hierarchies."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from remat_graph import Block, Graph, Hierarchy, Op, Stage, Value


@st.composite
def single_ops(draw) -> Graph:
    """One op, forward or backward, that makes up to three values, none of which need be wanted."""
    made = tuple(f"v{i}" for i in range(draw(st.integers(0, 3))))
    backward = draw(st.booleans())
    op = Op(
        name="op",
        inputs=("x",) if draw(st.booleans()) else (),
        outputs=made,
        time=float(draw(st.integers(0, 2))),
        workspace_bytes=draw(st.sampled_from([0, 3])),
        stage=Stage.BACKWARD if backward else Stage.FORWARD,
        replayable=draw(st.booleans()),
    )
    values = (Value("x", 5), *(Value(v, draw(st.integers(0, 2))) for v in made))
    results = draw(st.sets(st.sampled_from(made))) if made else set()
    return Graph(values, (op,), frozenset({"x"}), frozenset(results), "op" if backward else None)


@st.composite
def side_by_side(draw, part: st.SearchStrategy[Graph]) -> Graph:
    """Two graphs that share nothing, one after the other in each half."""
    left, right = (_renamed(draw(part), prefix) for prefix in ("l.", "r."))
    cuts = left.boundary_index, right.boundary_index
    forward = (*left.ops[: cuts[0]], *right.ops[: cuts[1]])
    backward = (*right.ops[cuts[1] :], *left.ops[cuts[0] :])
    return Graph(
        (*left.values, *right.values),
        (*forward, *backward),
        left.resident | right.resident,
        left.results | right.results,
        backward[0].name if backward else None,
    )


def _renamed(graph: Graph, prefix: str) -> Graph:
    def named(names):
        return tuple(prefix + name for name in names)

    return Graph(
        tuple(dataclasses.replace(v, name=prefix + v.name) for v in graph.values),
        tuple(
            dataclasses.replace(
                op,
                name=prefix + op.name,
                inputs=named(op.inputs),
                outputs=named(op.outputs),
                twin=None if op.twin is None else prefix + op.twin,
                order_after=named(op.order_after),
                overwrites=tuple((prefix + read, prefix + made) for read, made in op.overwrites),
            )
            for op in graph.ops
        ),
        frozenset(named(graph.resident)),
        frozenset(named(graph.results)),
        None if graph.boundary is None else prefix + graph.boundary,
    )


@st.composite
def hierarchies(draw, graph: Graph) -> Hierarchy:
    """Blocks of consecutive forward ops, one level deep, with single ops between them."""
    names = [op.name for op in graph.ops[: graph.boundary_index]]
    members: list[str | Block] = []
    while names:
        count = draw(st.integers(1, len(names)))
        taken, names = tuple(names[:count]), names[count:]
        whole = draw(st.booleans())
        members += [Block(f"block {len(members)}", taken)] if whole else taken
    return Hierarchy(graph, Block("root", tuple(members)))
