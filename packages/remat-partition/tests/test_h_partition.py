"""H-Partition against definitions written out: candidates, scores, the greedy order, the levels."""

import math
import random
from collections import Counter
from dataclasses import dataclass

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import Block, Graph, Op, Value, equivalence_classes
from remat_partition import dominators, merging, partition
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
    hubs = {x for x in dag if max(dag.in_degree(x), dag.out_degree(x)) > 4 * bound}
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
                if 2 <= len(group) <= bound and not group & {"source", *hubs}:
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
        Op("j", (), ("much", "little"), 1.0),
        Op("k", ("little",), ("vk",), 1.0),
        Op("x", ("much",), ("vx",), 1.0, order_after=("k",)),
        Op("y", ("little",), ("vy",), 1.0),
    )
    sizes = {"much": 100, "little": 1, "vk": 0, "vx": 1, "vy": 1}
    values = tuple(Value(v, size) for v, size in sizes.items())
    hard = tuple(Op(op.name, op.inputs, op.outputs, 1.0) for op in ops)

    def blocks(ops):
        graph = Graph(values, ops, results=frozenset(["vk", "vx", "vy"]))
        root = partition(graph, max_top_ops=3, max_block_ops=2).root
        return [tuple(b.op_names()) for b in root.blocks() if b is not root]

    assert blocks(hard) == [("j", "x")]
    assert blocks(ops) == [("k", "x")]


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


def height(block):
    return 1 + max((height(m) for m in block.members if isinstance(m, Block)), default=0)


def test_however_many_layers_a_level_has_few_kinds_of_blocks(plain):
    """First, last, and two sizes in between; more layers bring more levels, by their logarithm."""
    lowest = set()
    for layers in (96, 192, 384, 1536):
        before, classes = residual_layers(layers)
        unique = partition(plain(before, classes=classes)).unique_blocks
        kinds = Counter(height(found.representative) for found in unique)
        assert max(kinds.values()) <= 4
        lowest.add(kinds[1])
    assert len(lowest) == 1


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


@dataclass
class Work:
    """What partitioning does: scores, the values they look at, and steps of walks."""

    scores: int = 0
    looks: int = 0
    steps: int = 0


@pytest.fixture
def work(monkeypatch):
    """Count the work of the calls that follow."""
    done = Work()
    score, pop = merging._Merging.score, dominators.heappop

    def counting_score(self, groups):
        done.scores += 1
        done.looks += sum(len(self.reads[g]) + len(self.makes[g]) for g in groups)
        return score(self, groups)

    def counting_pop(heap):
        done.steps += 1
        return pop(heap)

    monkeypatch.setattr(merging._Merging, "score", counting_score)
    monkeypatch.setattr(dominators, "heappop", counting_pop)
    return done


def fork_join(width, count):
    """Forks to `width` ops and joins of them, one after the other."""
    before = [()]
    while len(before) < count:
        fork = len(before) - 1
        before += [(fork,)] * width
        before.append(tuple(range(fork + 1, fork + 1 + width)))
    return before


def read_all_along(hubs, count):
    """A chain whose ops all read the same values as well: a mask, sines and cosines."""
    chain = [(*range(hubs), *([i - 1] if i > hubs else [])) for i in range(hubs, count)]
    return [()] * hubs + chain


def rails(count):
    """Two chains, the second of which reads the first at every step."""
    before = [(), (0,)]
    while len(before) < count:
        first = len(before) - 2
        before += [(first,), (first + 1, first + 2)]
    return before


def random_dag(count):
    draw = random.Random(0)
    return [
        tuple(sorted(draw.sample(range(i), min(i, draw.choice([1, 2, 3]))))) for i in range(count)
    ]


def test_a_hub_is_cut_in_few_scores(plain, work):
    """A fork and a join over thousands of ops: none of them is scored again for each other."""
    count = 5000
    graph = plain(fork_join(count - 2, count))
    root = partition(graph).root
    assert len(root.members) <= 20
    assert len(equivalence_classes(graph)) == 3
    assert work.scores <= 10 * count


@pytest.mark.parametrize("width", [79, 81, 254])
def test_wide_forks_cost_no_more_than_four_bounds(plain, work, width):
    count = 2000
    partition(plain(fork_join(width, count)))
    assert work.looks <= 4 * 20 * 20 * count


@pytest.mark.parametrize("hubs", [1, 2, 8])
def test_values_read_all_along_cost_no_walks(plain, work, hubs):
    """Where no dominator is near, the distance to what is read says so without a walk."""
    count = 2000
    partition(plain(read_all_along(hubs, count)))
    assert work.steps <= count
    assert work.scores <= 60 * count


def test_a_dominator_far_away_is_not_walked_to(plain, work):
    count = 2000
    groups = dominated_groups(Quotient.of(plain(rails(count))), 20)
    assert groups
    assert work.steps <= 21 * count


@pytest.mark.parametrize("make", [rails, random_dag])
def test_a_huge_bound_costs_what_a_bound_of_64_does(plain, work, make):
    graph = plain(make(600))
    found = []
    for bound in (64, 10**6):
        work.looks = work.steps = 0
        root = partition(graph, max_block_ops=bound).root
        assert len(root.members) <= 20
        found.append((work.looks, work.steps))
    assert found[1][0] <= 2 * found[0][0]
    assert found[1][1] <= 2 * found[0][1]
