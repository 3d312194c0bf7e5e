"""The chain against articulation points by networkx and chains by exhaustion."""

import itertools

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import Block
from remat_partition import UnknownOption, partition
from remat_partition.quotient import Quotient
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
    cuts = _cuts(Quotient.of(plain(before)))
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
