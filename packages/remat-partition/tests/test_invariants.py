"""What every partitioner promises, on random graphs: validity, bounds, and no look at names."""

import os
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from remat_graph import Block, Graph, Stage, Value
from remat_partition import partition

BOUNDED = ("h-partition", "repeats")
ALL = ("h-partition", "repeats", "sequence")
BOUNDS = st.fixed_dictionaries(
    {
        "max_top_ops": st.integers(2, 12),
        "max_block_ops": st.integers(2, 12),
        "alpha": st.sampled_from([0.0, 0.5, 1.0, 1e308]),
    }
)


def dependencies(graph):
    """Hard and soft dependencies between forward ops, found independently of the package."""
    dag = nx.DiGraph()
    made_by = {v: op.name for op in graph.ops for v in op.outputs}
    for op in graph.ops:
        if op.stage is Stage.FORWARD:
            dag.add_node(op.name)
            dag.add_edges_from((made_by[v], op.name) for v in op.inputs if v in made_by)
            dag.add_edges_from((earlier, op.name) for earlier in op.order_after)
    return dag


def check(graph, root):
    """Check convexity by reachability, and the quotient of every block by its members."""
    dag = dependencies(graph)
    assert sorted(root.op_names()) == sorted(dag)
    below = {op: nx.descendants(dag, op) for op in dag}
    for block in root.blocks():
        inside = set(block.op_names())
        leaving = {op for op in set(dag) - inside if any(op in below[i] for i in inside)}
        assert not any(below[op] & inside for op in leaving)
        place = {}
        for i, member in enumerate(block.members):
            place |= dict.fromkeys(member.op_names() if isinstance(member, Block) else [member], i)
        quotient = nx.DiGraph((place[a], place[b]) for a, b in dag.subgraph(inside).edges)
        quotient.remove_edges_from(list(nx.selfloop_edges(quotient)))
        assert nx.is_directed_acyclic_graph(quotient)
        assert all(a < b for a, b in quotient.edges)


@pytest.mark.parametrize("partitioner", ALL)
@given(data=st.data())
def test_blocks_are_convex_and_quotients_acyclic(partitioner, graphs, data):
    graph = data.draw(graphs())
    options = data.draw(BOUNDS) if partitioner in BOUNDED else {}
    check(graph, partition(graph, partitioner=partitioner, **options).root)


@pytest.mark.parametrize("partitioner", BOUNDED)
@given(data=st.data())
def test_sizes_are_within_bounds(partitioner, graphs, data):
    graph = data.draw(graphs())
    options = data.draw(BOUNDS)
    root = partition(graph, partitioner=partitioner, **options).root
    assert len(root.members) <= options["max_top_ops"]
    if graph.boundary_index > 1:
        assert len(root.members) > 1
    for block in root.blocks():
        if block is not root:
            assert 2 <= len(block.members) <= options["max_block_ops"]


@pytest.mark.parametrize("partitioner", BOUNDED)
@settings(max_examples=40)
@given(data=st.data())
def test_what_fits_is_left_whole(partitioner, graphs, data):
    graph = data.draw(graphs(max_ops=12))
    count = graph.boundary_index
    root = partition(graph, partitioner=partitioner, max_top_ops=max(2, count)).root
    assert root == Block("root", tuple(op.name for op in graph.ops[:count]))


def renamed(graph, name):
    """The same graph with other names, and its values declared in another order."""

    def names(old):
        return tuple(map(name, old))

    ops = (
        type(op)(
            name(op.name), names(op.inputs), names(op.outputs), op.time, op.workspace_bytes,
            op.stage, op.twin and name(op.twin), op.equivalence, op.replayable,
            names(op.order_after),
        )
        for op in graph.ops
    )  # fmt: skip
    return Graph(
        tuple(Value(name(v.name), v.size_bytes) for v in reversed(graph.values)),
        tuple(ops),
        frozenset(names(graph.resident)),
        frozenset(names(graph.results)),
        graph.boundary and name(graph.boundary),
    )


def renamed_block(block, name):
    return Block(
        block.name,
        tuple(name(m) if isinstance(m, str) else renamed_block(m, name) for m in block.members),
    )


@pytest.mark.parametrize("partitioner", ALL)
@settings(max_examples=40)
@given(data=st.data())
def test_names_do_not_matter(partitioner, graphs, data):
    graph = data.draw(graphs())
    options = data.draw(BOUNDS) if partitioner in BOUNDED else {}
    key = data.draw(st.integers(0, 999))

    def name(old):
        return f"{hash((key, len(old))) % 97}/{old[::-1]}"

    first = partition(graph, partitioner=partitioner, **options)
    second = partition(renamed(graph, name), partitioner=partitioner, **options)
    assert second.root == renamed_block(first.root, name)
    assert partition(graph, partitioner=partitioner, **options) == first


SCRIPT = """
import random
from remat_graph import Graph, Op, Value
from remat_partition import partition
draw = random.Random(1)
count = 300
ops = []
for i in range(count):
    read = sorted(draw.sample(range(max(0, i - 9), i), min(i, draw.choice([1, 1, 2, 3]))))
    inputs = tuple(f"v{p}" for p in read)
    ops.append(Op(f"op{i}", inputs, (f"v{i}",), 1.0, equivalence=str(i % 5)))
values = tuple(Value(f"v{i}", draw.randint(0, 9)) for i in range(count))
graph = Graph(values, tuple(ops), results=frozenset({"v299", "v7"}))
for name in ("h-partition", "repeats", "sequence"):
    print(partition(graph, partitioner=name).root)
"""


def test_hash_seeds_do_not_matter():
    answers = set()
    for seed in ("0", "1", "271"):
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            cwd=Path(__file__).parent,
        )
        answers.add(run.stdout)
    assert len(answers) == 1
    assert answers.pop().count(b"Block") > 30


@settings(max_examples=40)
@given(data=st.data())
def test_resident_values_are_no_dependencies(graphs, data):
    """What is always there is at no border and in no path (C.1.3).

    `sequence` asks of an op with a twin whether it reads what may have a gradient.
    """
    graph = data.draw(graphs())
    assume(graph.ops)
    without = Graph(
        graph.values,
        tuple(
            type(op)(
                op.name, tuple(v for v in op.inputs if v != "w"), op.outputs, op.time,
                op.workspace_bytes, op.stage, op.twin, op.equivalence or "none", op.replayable,
                op.order_after,
            )
            for op in graph.ops
        ),
        graph.resident,
        graph.results,
        graph.boundary,
    )  # fmt: skip
    twins = any(op.twin is not None for op in graph.ops)
    for partitioner in ("h-partition",) if twins else ("h-partition", "sequence"):
        with_w = partition(graph, partitioner=partitioner)
        assert partition(without, partitioner=partitioner).root == with_w.root
