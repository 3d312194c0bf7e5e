"""H-Partition against definitions written out: candidates, scores, the greedy order, the levels."""

import math

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import Block, Graph, Op, Value, equivalence_classes
from remat_partition import partition
from remat_partition.dominators import dominated_groups
from remat_partition.merging import merge
from remat_partition.quotient import Quotient


def dag_of(quotient):
    dag = nx.DiGraph()
    dag.add_nodes_from(range(len(quotient)))
    dag.add_edges_from((p, x) for x, sources in enumerate(quotient.before) for p in sources)
    return dag


def every_candidate(dag, bound):
    """The four variants for every node, by networkx's dominators and by reachability."""
    dag = dag.copy()
    dag.add_edges_from(("source", x) for x in list(dag) if not dag.in_degree(x))
    dag.add_node("source")
    closest = nx.immediate_dominators(dag, "source")
    found = set()
    for x in dag:
        if x != "source":
            head = closest[x]
            between = nx.descendants(dag, head) & nx.ancestors(dag, x)
            for group in (between, between | {x}, between | {head}, between | {head, x}):
                if "source" not in group and 2 <= len(group) <= bound:
                    found.add(frozenset(group))
    return found


@given(data=st.data())
def test_candidates_are_what_lies_between_a_node_and_its_dominator(graphs, data):
    quotient = Quotient.of(data.draw(graphs()))
    bound = data.draw(st.integers(2, 12))
    dag = dag_of(quotient)
    assert set(map(frozenset, dominated_groups(quotient, bound))) == every_candidate(dag, bound)
    leaving = dominated_groups(quotient, bound, leaving=True)
    assert set(map(frozenset, leaving)) == every_candidate(dag.reverse(), bound)


def border_bytes(graph, group):
    """Bytes of the values that enter or leave a group of forward ops, from the definition."""
    count = graph.boundary_index

    def place(i):
        op = graph.ops[i]
        if i < count:
            return i
        return None if op.twin is None else graph.op_index[op.twin]

    total = 0
    for value in graph.values:
        maker = graph.producer.get(value.name)
        if maker is not None and maker < count:
            readers = {place(i) for i in graph.consumers[value.name]} - {None}
            leaves = maker in group and (readers - group or value.name in graph.results)
            enters = maker not in group and readers & group
            total += value.size_bytes if leaves or enters else 0
    return total


def greedy(graph, candidates, bound, most, alpha):
    """Algorithm 2, lines 6 to 10, with everything computed anew at every step."""

    def score(group):
        border = border_bytes(graph, group)
        return math.log(border) + alpha * math.log(len(group)) if border else -math.inf

    groups = [frozenset([i]) for i in range(graph.boundary_index)]
    candidates = [frozenset(c) for c in candidates]
    while candidates and len(groups) > most:
        best = min(candidates, key=score)
        if best == frozenset().union(*groups):
            candidates.remove(best)
            continue
        groups = [g for g in groups if not g & best] + [best]
        candidates = [c | best if c & best else c for c in candidates]
        candidates = [c for c in candidates if len(c) <= bound and c not in groups]
    return set(groups)


@given(data=st.data())
def test_merging_follows_equation_1(graphs, data):
    graph = data.draw(graphs(max_ops=14))
    bound, most = data.draw(st.integers(2, 8)), data.draw(st.integers(2, 6))
    alpha = data.draw(st.sampled_from([0.0, 0.5, 2.0]))
    quotient = Quotient.of(graph)
    leaving = data.draw(st.booleans())
    candidates = dominated_groups(quotient, bound, leaving=leaving)
    merged = merge(quotient, candidates, bound=bound, most=most, alpha=alpha)
    assert set(map(frozenset, merged)) == greedy(graph, candidates, bound, most, alpha)


def test_groups_that_would_close_a_cycle_are_not_ordered(plain):
    """Both groups are convex; together they are not."""
    quotient = Quotient.of(plain([(), (), (0,), (1,)]))
    with pytest.raises(ValueError, match="has a cycle"):
        quotient.order([[0, 3], [1, 2]])
    assert quotient.order([[1, 3], [2, 0]]) == [[0, 2], [1, 3]]


def test_a_soft_dependency_keeps_its_source_with_what_follows():
    """C.1.2: j -> k -> (soft) x, j -> x: no block has j and x without k."""
    ops = (
        Op("j", (), ("vj",), 1.0),
        Op("k", ("vj",), ("vk",), 1.0),
        Op("x", ("vj",), ("vx",), 1.0, order_after=("k",)),
        Op("end", ("vk", "vx"), ("e",), 1.0),
    )
    # Without the soft dependency, j and x are the best block: nothing big leaves them.
    sizes = {"vj": 100, "vk": 100, "vx": 1, "e": 1}
    values = tuple(Value(v, size) for v, size in sizes.items())
    hard = tuple(Op(op.name, op.inputs, op.outputs, 1.0) for op in ops)
    roots = [
        partition(Graph(values, each), max_top_ops=3, max_block_ops=2).root for each in (ops, hard)
    ]
    inside = [{frozenset(b.op_names()) for b in root.blocks()} for root in roots]
    assert frozenset("jx") not in inside[0]


def residual_layers(count):
    """Layers x -> a -> b -> (+x), all of which also read one mask."""
    before, classes = [(), ()], ["embedding", "mask"]
    last = 0
    for _ in range(count):
        start = len(before)
        before += [
            (last,),
            tuple(sorted((start, 1))),
            (start + 1,),
            tuple(sorted((start + 2, last))),
        ]
        classes += ["norm", "masked", "linear", "add"]
        last = start + 3
    return before, classes


def test_a_mask_that_all_layers_read_leaves_layers_whole(plain):
    """No join has a dominator close by, but every layer has one way out."""
    before, classes = residual_layers(40)
    root = partition(
        plain(before, classes=classes), max_top_ops=12, max_block_ops=4, alpha=0.5
    ).root
    blocks = {tuple(b.op_names()) for b in root.blocks()}
    layers = [tuple(f"op{2 + 4 * i + j}" for j in range(4)) for i in range(40)]
    assert sum(layer in blocks for layer in layers) >= 36


def depth(block):
    return 1 + max((depth(m) for m in block.members if isinstance(m, Block)), default=0)


@pytest.mark.parametrize("bound", [2, 3, 10])
def test_levels_grow_with_the_logarithm(plain, bound):
    for count in (100, 1000):
        chain = plain([(i - 1,) if i else () for i in range(count)])
        root = partition(chain, max_top_ops=4, max_block_ops=bound).root
        fewest = math.ceil(math.log(count / 4, bound))
        most = math.ceil(math.log(count / 4, (bound + 1) / 2)) + 1
        assert 1 + fewest <= depth(root) <= 1 + most


def test_more_layers_bring_few_new_blocks(plain):
    found = []
    for layers in (24, 96):
        before, classes = residual_layers(layers)
        found.append(len(partition(plain(before, classes=classes)).unique_blocks))
    assert found[1] <= found[0] + 4
    assert found[1] <= 12


def test_alpha_prefers_short_blocks(plain):
    """Little crosses around the long block: alpha 0 takes it first, a large alpha the short one."""
    sizes = [9, 9, 9, 1, 9, 2, 1, 1]
    chain = plain([(i - 1,) if i else () for i in range(8)], sizes=sizes)
    roots = [partition(chain, max_top_ops=4, max_block_ops=5, alpha=alpha).root for alpha in (0, 5)]
    assert roots[0] != roots[1]
    longest = [
        max(len(list(b.op_names())) for b in r.members if isinstance(b, Block)) for r in roots
    ]
    assert longest[0] > longest[1]


def test_sizes_beyond_floats_are_compared(plain):
    huge = 10**400
    sizes = [huge, 1, huge, 1, huge, huge, 1, huge]
    chain = plain([(i - 1,) if i else () for i in range(8)], sizes=sizes)
    root = partition(chain, max_top_ops=5, max_block_ops=2).root
    crossing = [sizes[int(op[2:])] for m in root.members for op in [last_op(m)]]
    assert sum(size == huge for size in crossing) <= 3


def last_op(member):
    return member if isinstance(member, str) else list(member.op_names())[-1]


def test_a_hub_is_cut_in_time(plain):
    """A fork and a join over thousands of ops; quadratic work would take minutes."""
    count = 5000
    graph = plain([(), *[(0,)] * (count - 2), tuple(range(1, count - 1))])
    root = partition(graph).root
    assert len(root.members) <= 20
    assert len(equivalence_classes(graph)) == 3
