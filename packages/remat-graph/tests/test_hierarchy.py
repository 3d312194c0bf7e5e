import copy
import pickle

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import (
    Block,
    Hierarchy,
    InvalidGraph,
    Stage,
    decode,
    encode,
    from_networkx,
    to_svg,
)


def test_a_tree_over_the_forward_ops(diamond):
    inner = Block("inner", ("B", "C"))
    root = Block("root", ("A", inner, "L"))
    Hierarchy(diamond, root)
    assert list(root.op_names()) == ["A", "B", "C", "L"]
    assert list(root.blocks()) == [root, inner]


@pytest.mark.parametrize(
    ("members", "match"),
    [
        (("A", "B", "C"), r"op 'L' is in no block \(1 missing in all\)"),
        (("A", "B"), r"op 'C' is in no block \(2 missing in all\)"),
        (("A", "B", "C", "L", "B"), "op 'B' is in two blocks"),
        (("A", Block("x", ("B", "C")), Block("y", ("C", "L"))), "op 'C' is in two blocks"),
        (("A", "B", "C", "L", "dL"), "'dL', which is no forward op"),
        (("A", "B", "C", "L", "zzz"), "'zzz', which is no forward op"),
        (("A", Block("x", ("B",)), Block("x", ("C", "L"))), "two blocks are called 'x'"),
        (("A", Block("root", ("B", "C", "L"))), "two blocks are called 'root'"),
        (("A", "B", "C", "L", Block("x", ())), "block 'x' is empty"),
        (("A", "B", "C", "L", Block("x", (Block("y", ()),))), "block 'y' is empty"),
    ],
)
def test_refuses(diamond, members, match):
    with pytest.raises(InvalidGraph, match=match):
        Hierarchy(diamond, Block("root", members))


def test_a_graph_without_forward_ops_has_an_empty_root(diamond):
    empty = type(diamond)((), ())
    assert list(Hierarchy(empty, Block("root", ())).root.op_names()) == []
    with pytest.raises(InvalidGraph, match="block 'inner' is empty"):
        Hierarchy(empty, Block("root", (Block("inner", ()),)))


def test_members_are_a_tuple(diamond):
    listed = Block("root", ["A", Block("inner", ["B", "C"]), "L"])
    assert listed == Block("root", ("A", Block("inner", ("B", "C")), "L"))
    assert hash(listed) == hash(Hierarchy(diamond, listed).root)
    with pytest.raises(InvalidGraph, match="block 'root' has the string 'ABCL' for members"):
        Block("root", "ABCL")


def nested(levels):
    block = Block("b0", ("A", "B", "C", "L"))
    for i in range(1, levels):
        block = Block(f"b{i}", (block,))
    return block


def test_what_is_nested_too_deep_is_refused_and_nothing_else_fails(diamond):
    deepest = Hierarchy(diamond, nested(100))
    assert pickle.loads(pickle.dumps(deepest)) == copy.deepcopy(deepest) == deepest
    assert decode(encode(deepest)) == deepest
    assert len(deepest.unique_blocks) == 1
    assert to_svg(deepest).count("<rect") == 1 + 100 + 4
    for levels in (101, 3000):
        with pytest.raises(InvalidGraph, match=rf"'b{levels - 101}' is more than 100 blocks deep"):
            Hierarchy(diamond, nested(levels))


@pytest.mark.parametrize(
    ("members", "match"),
    [
        (("B", "A", "C", "L"), "op 'B' comes after 'A', but in block 'root' it is in member 0"),
        (("A", "C", "B", "L"), "op 'C' comes after 'B', but in block 'root'"),  # soft
        (("A", Block("x", ("B", "L")), "C"), "op 'L' comes after 'C', but in block 'root'"),
        (("A", Block("x", (Block("y", ("B", "L")), "C"))), "op 'L' comes after 'C', but in .*'x'"),
        ((Block("x", ("B", "C")), Block("y", ("A", "L"))), "'B' comes after 'A', but .*'root'"),
        ((Block("x", (Block("y", ("A", "L")),)), Block("z", ("B", "C"))), "'L' comes after 'B'"),
    ],
)
def test_members_stand_in_execution_order(diamond, members, match):
    with pytest.raises(InvalidGraph, match=match):
        Hierarchy(diamond, Block("root", members))


def dependencies(graph):
    """Hard and soft dependencies between forward ops."""
    dag = nx.DiGraph()
    for op in graph.ops[: graph.boundary_index]:
        dag.add_node(op.name)
        dag.add_edges_from((graph.ops[graph.producer[v]].name, op.name)
                           for v in op.inputs if v in graph.producer)  # fmt: skip
        dag.add_edges_from((earlier, op.name) for earlier in op.order_after)
    return dag


def blocks_of(data, names, prefix="b"):
    """Draw a tree over names in this order."""
    members = []
    while names:
        size = data.draw(st.integers(1, len(names)))
        part, names = names[:size], names[size:]
        if size > 1 and len(prefix) < 5:
            members.append(Block(f"{prefix}{len(members)}", blocks_of(data, part, prefix + "b")))
        else:
            members += part
    return tuple(members)


def unique(block, counter):
    return Block(
        f"b{next(counter)}",
        tuple(unique(m, counter) if isinstance(m, Block) else m for m in block.members),
    )


@given(data=st.data())
def test_exactly_the_trees_of_convex_blocks_in_order_are_accepted(graphs, data):
    """Convexity and acyclic quotients by their definitions, on trees over any order of the ops."""
    graph = data.draw(graphs())
    forward = [op.name for op in graph.ops if op.stage is Stage.FORWARD]
    order = data.draw(st.just(forward) | st.permutations(forward))
    root = unique(Block("", blocks_of(data, list(order))), iter(range(10_000)))
    dag = dependencies(graph)
    try:
        Hierarchy(graph, root)
    except InvalidGraph:
        assert not all(in_order(dag, block) for block in root.blocks())
        return
    for block in root.blocks():
        assert in_order(dag, block)
        inside = set(block.op_names())
        leaving = {d for op in inside for d in nx.descendants(dag, op)} - inside
        assert not any(nx.descendants(dag, op) & inside for op in leaving)
        assert nx.is_directed_acyclic_graph(nx.quotient_graph(dag.subgraph(inside), groups(block)))


def groups(block):
    return [set(m.op_names()) if isinstance(m, Block) else {m} for m in block.members]


def in_order(dag, block):
    parts = groups(block)
    return not any(
        dag.has_edge(late, early)
        for i, earlier in enumerate(parts)
        for later in parts[i + 1 :]
        for early in earlier
        for late in later
    )


def test_a_large_hierarchy_is_accepted():
    dag = nx.path_graph(20_000, create_using=nx.DiGraph)
    graph = from_networkx(dag)
    names = [op.name for op in graph.ops]
    members = tuple(Block(f"b{i}", tuple(names[i : i + 10])) for i in range(0, 20_000, 10))
    assert len(Hierarchy(graph, Block("root", members)).root.members) == 2_000
