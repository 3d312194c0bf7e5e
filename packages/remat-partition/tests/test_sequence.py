"""The chain against articulation points by networkx and chains by exhaustion."""

import itertools
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import Block, Graph, Op, Stage, Value
from remat_partition import UnknownOption, partition
from remat_partition.sequence import _cuts


def dag_of(before):
    dag = nx.DiGraph()
    dag.add_nodes_from(range(len(before)))
    dag.add_edges_from((p, x) for x, sources in enumerate(before) for p in sources)
    return dag


def behind_and_before(dag, node):
    """The sets of nodes that hang before and behind a node alone, or None if some do both."""
    rest = dag.to_undirected()
    rest.remove_node(node)
    before, behind = set(), set()
    for piece in nx.connected_components(rest):
        comes, goes = piece & set(dag.pred[node]), piece & set(dag.succ[node])
        if comes and goes:
            return None
        if comes:
            before |= piece
        if goes:
            behind |= piece
    return before, behind


def every_cut(dag):
    cuts = {}
    for node in dag:
        sides = behind_and_before(dag, node)
        if sides is not None and sides[1]:
            cuts[node] = sides
    return cuts


@given(data=st.data())
def test_cuts_are_articulation_ops(dags, plain, data):
    before = data.draw(dags(max_ops=16))
    dag = dag_of(before)
    cuts = _cuts(before)
    assert cuts == set(every_cut(dag))
    articulations = set(nx.articulation_points(dag.to_undirected()))
    assert {node for node in cuts if dag.in_degree(node)} <= articulations


@given(data=st.data())
def test_the_chain_is_a_longest(dags, plain, data):
    before = data.draw(dags(max_ops=9))
    dag = dag_of(before)
    cuts = every_cut(dag)
    follows = {
        (a, b) for a, b in itertools.permutations(cuts, 2) if b in cuts[a][1] and a in cuts[b][0]
    }
    longest = max(
        (
            len(chosen)
            for count in range(len(cuts) + 1)
            for chosen in itertools.combinations(cuts, count)
            if all((a, b) in follows or (b, a) in follows
                   for a, b in itertools.combinations(chosen, 2))
        ),
        default=0,
    )  # fmt: skip
    root = partition(plain(before), partitioner="sequence").root
    if longest:
        assert len(root.members) == longest + 1
    else:
        assert root.members == tuple(f"op{i}" for i in range(len(before)))


@given(data=st.data())
def test_one_op_alone_is_read_across_a_cut(dags, plain, data):
    before = data.draw(dags())
    root = partition(plain(before), partitioner="sequence").root
    place = {}
    if any(isinstance(m, Block) for m in root.members):
        for i, member in enumerate(root.members):
            names = member.op_names() if isinstance(member, Block) else [member]
            place |= {int(op[2:]): i for op in names}
        for cut in range(1, len(root.members)):
            made = {p for x, sources in enumerate(before) for p in sources
                    if place[p] < cut <= place[x]}  # fmt: skip
            assert len(made) == 1


def encoder_decoder(layers):
    """Layers x -> a -> (+x) twice over; the decoder has an entry of its own and reads the end."""
    before = [()]
    for _ in range(layers):
        last = len(before) - 1
        before += [(last,), (last, last + 1)]
    memory = len(before) - 1
    before.append(())
    for _ in range(layers):
        last = len(before) - 1
        before += [tuple(sorted({last, memory})), (last, last + 1)]
    return before


def test_the_encoder_is_a_chain_and_the_decoder_a_block(plain):
    """C.1.3: a second input does not keep the encoder from being a chain."""
    root = partition(plain(encoder_decoder(6)), partitioner="sequence").root
    assert len(root.members) == 8
    assert len(root.members[-1].members) == 1 + 2 * 6
    assert all(len(m.members) == 2 for m in root.members[1:-1])


def test_chains_have_blocks_of_single_ops_as_ops(plain):
    chain = plain([(i - 1,) if i else () for i in range(5)])
    assert partition(chain, partitioner="sequence").root.members == tuple(
        f"op{i}" for i in range(5)
    )


@pytest.mark.parametrize("option", ["max_top_ops", "max_block_ops", "alpha", "depth"])
def test_there_are_no_options(plain, option):
    with pytest.raises(UnknownOption, match=rf"'sequence' takes no option '{option}'; .*none"):
        partition(plain([()]), partitioner="sequence", **{option: 5})


def masked_layers(layers, *, twins=True):
    """Residual layers that read one mask and drop out in order, and their backward half.

    As captured: positions and mask have no gradient, yet positions are the twin of an op.
    """
    ops = [
        Op("arange", (), ("arange",), 1.0),
        Op("positions", ("arange",), ("positions",), 1.0),
        Op("mask", ("positions",), ("mask",), 1.0),
        Op("h0", ("w", "positions"), ("h0",), 1.0),
    ]
    gradients = ["positions", "h0"]
    for i in range(1, layers + 1):
        after = (f"dropped{i - 1}",) if i > 1 else ()
        ops += [
            Op(f"scores{i}", (f"h{i - 1}", "w"), (f"scores{i}",), 1.0),
            Op(f"masked{i}", (f"scores{i}", "mask"), (f"masked{i}",), 1.0),
            Op(f"dropped{i}", (f"masked{i}",), (f"dropped{i}",), 1.0, order_after=after),
            Op(f"h{i}", (f"h{i - 1}", f"dropped{i}"), (f"h{i}",), 1.0),
        ]
        gradients += [f"scores{i}", f"dropped{i}"]
    ops.append(Op("count", ("w",), ("count",), 1.0))
    values = [Value("w", 1), *(Value(op.name, 1) for op in ops)]
    for twin in reversed(gradients):
        values.append(Value(f"d_{twin}", 1))
        back = twin if twins else None
        ops.append(Op(f"d_{twin}", (twin,), (f"d_{twin}",), 1.0, 0, Stage.BACKWARD, back))
    results = frozenset({f"h{layers}", "count"})
    return Graph(tuple(values), tuple(ops), frozenset({"w"}), results, f"d_{gradients[-1]}")


def names_of(root):
    return [tuple(m.op_names()) if isinstance(m, Block) else (m,) for m in root.members]


def test_what_makes_no_gradient_and_the_order_of_dropouts_hold_no_layers_together():
    """C.1.3; a mask goes to the first layer that reads it, a counter that nothing reads last."""
    found = names_of(partition(masked_layers(3), partitioner="sequence").root)
    assert found == [
        ("arange", "positions", "h0"),
        ("mask", "scores1", "masked1", "dropped1", "h1"),
        ("scores2", "masked2", "dropped2", "h2"),
        ("scores3", "masked3", "dropped3", "h3", "count"),
    ]


def test_without_twins_all_that_is_read_counts():
    found = names_of(partition(masked_layers(3, twins=False), partitioner="sequence").root)
    assert found[:2] == [("arange",), ("positions",)]
    assert len(found) == 3
    assert max(map(len, found)) == 15


def with_order(graph, after):
    """The same graph with soft dependencies: of each op, the one that it comes after."""
    ops = [
        replace(op, order_after=(f"op{after[i]}",) if i in after else ())
        for i, op in enumerate(graph.ops)
    ]
    return replace(graph, ops=tuple(ops))


def test_what_hangs_on_nothing_is_where_it_is_first_needed(plain):
    graph = plain([(), (0,), (), (2,), (1,), (4,)])
    free = names_of(partition(graph, partitioner="sequence").root)
    assert free == [("op0",), ("op1",), ("op4",), ("op2", "op3", "op5")]
    found = names_of(partition(with_order(graph, {4: 3}), partitioner="sequence").root)
    assert found == [("op0",), ("op1",), ("op2", "op3", "op4"), ("op5",)]


def test_blocks_are_merged_where_a_soft_dependency_runs_against_them(plain):
    """Op 4 reads the first of a chain, and comes after the last."""
    graph = plain([(), (0,), (1,), (2,), (0,)])
    free = names_of(partition(graph, partitioner="sequence").root)
    assert free == [("op0",), ("op1", "op4"), ("op2",), ("op3",)]
    found = names_of(partition(with_order(graph, {4: 3}), partitioner="sequence").root)
    assert found == [("op0",), ("op1", "op2", "op3", "op4")]
