"""Random forward graphs of the shapes that models have, with a backward half for some."""

import networkx as nx
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from remat_graph import Graph, Op, Stage, Value

settings.register_profile("remat", deadline=None, max_examples=50)
settings.load_profile("remat")

SIZES = st.sampled_from([0, 1, 1, 2, 3, 5, 8, 64, 10**30])


@st.composite
def random_dags(draw, max_ops=24):
    """Draw the predecessors of each node: a layered, series-parallel, skipping or any DAG."""
    shape = draw(st.sampled_from(["layered", "series-parallel", "skips", "any"]))
    count = draw(st.integers(0, max_ops))
    before = [set() for _ in range(count)]
    if shape == "series-parallel":
        edges = [(0, count - 1)] if count > 1 else []
        for node in range(1, count - 1):
            # In series on an edge, or parallel to one.
            at = draw(st.integers(0, len(edges) - 1))
            low, high = edges[at]
            if draw(st.booleans()):
                del edges[at]
            edges += [(low, node), (node, high)]
        order = list(nx.lexicographical_topological_sort(nx.DiGraph(edges))) if edges else []
        place = {node: i for i, node in enumerate(order)}
        for low, high in edges:
            before[place[high]].add(place[low])
        return [tuple(sorted(sources)) for sources in before]
    width = draw(st.integers(1, 6))
    entries = draw(st.integers(1, 3))
    for node in range(entries, count):
        reach = {"layered": 2 * width, "skips": 1, "any": node}[shape]
        near = st.integers(max(0, node - reach), node - 1)
        before[node] |= draw(st.sets(near, min_size=shape != "any", max_size=3))
        if shape == "skips" and draw(st.integers(0, 3)) == 0:
            before[node].add(draw(st.integers(0, node - 1)))
    return [tuple(sorted(sources)) for sources in before]


@st.composite
def random_graphs(draw, max_ops=24):
    """Any forward graph over such a DAG, with what else a training graph has."""
    before = draw(random_dags(max_ops=max_ops))
    soft = [draw(st.integers(0, 9)) == 0 and node > 0 for node in range(len(before))]
    kinds = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=5))
    values = [Value("w", 7)]
    ops = []
    for node, sources in enumerate(before):
        outputs = [Value(f"v{node}", draw(SIZES))]
        if draw(st.integers(0, 5)) == 0:
            outputs.append(Value(f"v{node}b", draw(SIZES)))
        inputs = [draw(st.sampled_from(_made_by(ops[s]))) for s in sources]
        if draw(st.integers(0, 4)) == 0:
            inputs.append("w")
        after = (f"op{draw(st.integers(0, node - 1))}",) if soft[node] else ()
        ops.append(
            Op(
                f"op{node}",
                tuple(inputs),
                tuple(v.name for v in outputs),
                1.0,
                equivalence=kinds[node % len(kinds)],
                order_after=after,
            )
        )
        values += outputs
    results = {f"v{len(before) - 1}"} if before else set()
    boundary = None
    if before and draw(st.booleans()):
        boundary = "d0"
        for i in range(draw(st.integers(1, 5))):
            twin = draw(st.sampled_from([None, *(op.name for op in ops[: len(before)])]))
            read = draw(
                st.lists(st.sampled_from([v.name for v in values]), unique=True, max_size=2)
            )
            values.append(Value(f"g{i}", 1))
            ops.append(Op(f"d{i}", tuple(read), (f"g{i}",), 1.0, 0, Stage.BACKWARD, twin))
    return Graph(tuple(values), tuple(ops), frozenset({"w"}), frozenset(results), boundary)


def _made_by(op):
    return list(op.outputs)


@pytest.fixture(scope="session")
def dags():
    """Strategy for the predecessors of each node of a random DAG."""
    return random_dags


@pytest.fixture(scope="session")
def graphs():
    """Strategy for random graphs."""
    return random_graphs


def plain_graph(before, *, sizes=None, classes=None):
    """Make a graph with one value per op from the predecessors of each."""
    count = len(before)
    values = tuple(Value(f"v{i}", 1 if sizes is None else sizes[i]) for i in range(count))
    ops = tuple(
        Op(
            f"op{i}",
            tuple(f"v{s}" for s in sources),
            (f"v{i}",),
            1.0,
            equivalence=None if classes is None else classes[i],
        )
        for i, sources in enumerate(before)
    )
    return Graph(values, ops, results=frozenset({f"v{count - 1}"} if count else ()))


@pytest.fixture(scope="session")
def plain():
    """Function that makes a graph from the predecessors of each op."""
    return plain_graph
