from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import Graph, Op, Provenance, Stage, Value, canonical_hash, equivalence_classes


def renamed(graph, op, value):
    """Rename every op and value by the two functions."""
    return Graph(
        values=tuple(Value(value(v.name), v.size_bytes) for v in graph.values),
        ops=tuple(
            replace(
                o,
                name=op(o.name),
                inputs=tuple(map(value, o.inputs)),
                outputs=tuple(map(value, o.outputs)),
                twin=None if o.twin is None else op(o.twin),
                order_after=tuple(map(op, o.order_after)),
                overwrites=tuple((value(v), value(w)) for v, w in o.overwrites),
                provenance=Provenance(op(o.name), "other.py:1"),
            )
            for o in graph.ops
        ),
        resident=frozenset(map(value, graph.resident)),
        results=frozenset(map(value, graph.results)),
        boundary=None if graph.boundary is None else op(graph.boundary),
    )


def changed(graph, op=0, **fields):
    ops = list(graph.ops)
    ops[op] = replace(ops[op], **fields)
    return replace(graph, ops=tuple(ops))


def resized(graph, name, size):
    return replace(
        graph,
        values=tuple(Value(v.name, size) if v.name == name else v for v in graph.values),
    )


@given(data=st.data())
def test_names_do_not_matter(graphs, data):
    graph = data.draw(graphs())
    salt = data.draw(st.text(min_size=1, max_size=3))
    other = renamed(graph, lambda name: salt + name[::-1], lambda name: name + salt)
    assert canonical_hash(other) == canonical_hash(graph)


@given(data=st.data())
def test_nor_does_the_order_of_values_or_of_soft_dependencies(graphs, data):
    graph = data.draw(graphs())
    other = replace(
        graph,
        values=tuple(data.draw(st.permutations(graph.values))),
        ops=tuple(
            replace(
                op,
                order_after=2 * op.order_after[::-1],
                overwrites=op.overwrites[::-1],
            )
            for op in graph.ops
        ),
    )
    assert canonical_hash(other) == canonical_hash(graph)


def test_everything_else_does(diamond):
    third = changed(diamond, 2, order_after=())
    twinless = changed(diamond, 5, twin=None)
    others = [
        changed(diamond, 0, time=1.5),
        changed(diamond, 0, workspace_bytes=6),
        changed(diamond, 0, equivalence="conv"),
        changed(diamond, 0, equivalence=None),
        changed(diamond, 0, replayable=False),
        changed(diamond, 0, inputs=()),
        changed(diamond, 3, inputs=("c", "b")),
        changed(diamond, 3, inputs=("b", "c", "a")),
        changed(diamond, 1, outputs=("stats", "b")),
        changed(diamond, 5, twin="B"),
        third,
        twinless,
        changed(third, 2, order_after=("A",)),
        changed(resized(diamond, "b", 4), 1, overwrites=(("a", "b"),)),
        resized(diamond, "b", 4),
        resized(diamond, "a", 5),
        resized(diamond, "w", 5),
        replace(diamond, results=frozenset({"dw"})),
        replace(diamond, results=frozenset({"dw", "loss", "a"})),
        replace(diamond, results=frozenset({"dw", "loss", "w"})),
        replace(diamond, values=(*diamond.values, Value("p", 1)), resident=frozenset("wp")),
        replace(diamond, values=(*diamond.values, Value("p", 2)), resident=frozenset("wp")),
        replace(
            diamond,
            values=(*diamond.values, Value("p", 2)),
            resident=frozenset("wp"),
            results=diamond.results | {"p"},
        ),
        changed(twinless, 4, twin=None),
    ]
    hashes = [canonical_hash(graph) for graph in (diamond, *others)]
    assert len(set(hashes)) == len(hashes)


def test_boundary_alone_matters():
    """The only difference that an op-less half can make."""
    op = Op("op", (), (), 1.0)
    forward = Graph((), (op,))
    backward = Graph((), (replace(op, stage=Stage.BACKWARD),), boundary="op")
    assert canonical_hash(forward) != canonical_hash(backward)


def test_resident_and_made_values_differ():
    read = Op("read", ("x",), (), 1.0)
    resident = Graph((Value("x", 1),), (Op("make", (), (), 1.0), read), resident=frozenset("x"))
    made = Graph((Value("x", 1),), (Op("make", (), ("x",), 1.0), read))
    assert canonical_hash(resident) != canonical_hash(made)


@given(data=st.data())
def test_equal_hashes_mean_equal_up_to_names(graphs, data):
    """The converse on small graphs, where a collision by construction would be likely."""
    one, two = data.draw(graphs(max_ops=2)), data.draw(graphs(max_ops=2))
    assert (canonical_hash(one) == canonical_hash(two)) == (normal(one) == normal(two))


def normal(graph):
    """Names replaced by the order of first mention; what is never mentioned sorted by size."""
    mentioned = dict.fromkeys(v for op in graph.ops for v in (*op.inputs, *op.outputs))
    silent = sorted(
        (v.name for v in graph.values if v.name not in mentioned),
        key=lambda name: (graph.value_by_name[name].size_bytes, name in graph.results),
    )
    number = {v: f"v{i:03}" for i, v in enumerate((*mentioned, *silent))}
    result = renamed(graph, lambda op: f"op{graph.op_index[op]}", number.__getitem__)
    return replace(
        result,
        values=tuple(sorted(result.values, key=lambda v: v.name)),
        ops=tuple(replace(op, order_after=tuple(sorted(op.order_after))) for op in result.ops),
    )


def test_the_hash_is_this_one():
    """Hashes are kept in files and compared across versions; a change needs a new prefix."""
    graph = Graph((Value("x", 1),), (Op("make", (), ("x",), 1.0),), results=frozenset("x"))
    assert canonical_hash(graph) == (
        "516f063d9d499aabd37bd6599c09591fd037dc7ef948d1d2a2b81abfe306e24a"
    )


def test_equivalence_classes():
    values = tuple(Value(f"v{i}", size) for i, size in enumerate([4, 4, 8, 4, 4, 4]))

    def make(i, **fields):
        return Op(f"op{i}", (), (f"v{i}",), **({"time": 1.0} | fields))

    graph = Graph(
        values,
        (
            make(0),
            make(1),  # as 0: the same costs and sizes
            make(2),  # another size
            make(3, time=2.0),  # another time
            make(4, time=2.0, equivalence="e"),
            make(5, time=7.0, equivalence="e"),  # as 4: it is declared
        ),
    )
    assert equivalence_classes(graph) == (("op0", "op1"), ("op2",), ("op3",), ("op4", "op5"))


@pytest.mark.parametrize("declared", [True, False])
def test_equivalence_looks_at_sizes(declared):
    ops = tuple(
        Op(f"op{i}", (f"v{i}",), (), 1.0, equivalence="e" if declared else None) for i in range(3)
    )
    values = (Value("v0", 1), Value("v1", 2), Value("v2", 1))
    graph = Graph(values, ops, resident=frozenset({"v0", "v1", "v2"}))
    assert equivalence_classes(graph) == (("op0", "op2"), ("op1",))


@given(data=st.data())
def test_classes_partition_the_ops(graphs, data):
    graph = data.draw(graphs())
    classes = equivalence_classes(graph)
    assert sorted(name for group in classes for name in group) == sorted(graph.op_index)
    firsts = [graph.op_index[group[0]] for group in classes]
    assert firsts == sorted(firsts)
