"""Minimum cuts against all cuts, and against scipy's maximum flows."""

import itertools
import random

import numpy as np
import pytest
from scipy import sparse
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from solver_cases.synthetic import gpt2

from remat_graph import simulate
from remat_solvers import store_all
from remat_solvers.bounds import bottleneck as bounds
from remat_solvers.core.cuts import least_cut
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring
from remat_solvers.search import replay as descent


def network(seed, nodes):
    """Draw arcs between nodes, from the first to the last; some have no capacity."""
    draw = random.Random(seed)
    pairs = [pair for pair in itertools.permutations(range(nodes), 2) if draw.random() < 0.4]
    return [(tail, head, draw.choice([0, 1, 2, 5, 2**40])) for tail, head in pairs]


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_is_smaller_and_none_as_small_has_fewer_nodes(seed):
    nodes = 2 + seed % 6
    arcs = network(seed, nodes)
    value, side = least_cut(arcs, 0, nodes - 1)
    inner = range(1, nodes - 1)
    sides = [
        {0, *chosen}
        for count in range(nodes - 1)
        for chosen in itertools.combinations(inner, count)
    ]
    values = [
        sum(size for tail, head, size in arcs if tail in each and head not in each)
        for each in sides
    ]
    assert value == min(values)
    least = [each for each, its in zip(sides, values, strict=True) if its == value]
    assert set(side) == set.intersection(*least)
    assert len(side) == len(set(side))


@pytest.mark.parametrize("seed", range(10))
def test_cuts_are_those_of_scipy(seed):
    arcs = [(tail, head, min(size, 100)) for tail, head, size in network(seed, 25)]
    tails, heads, sizes = (np.array(each, dtype=np.int32) for each in zip(*arcs, strict=True))
    graph = sparse.csr_matrix((sizes, (tails, heads)), shape=(25, 25))
    flow = maximum_flow(graph, 0, 24)
    left = graph - flow.flow
    left.eliminate_zeros()
    side = breadth_first_order(left, 0, return_predecessors=False)
    value, found = least_cut(arcs, 0, 24)
    assert value == flow.flow_value
    assert sorted(found) == sorted(side.tolist())


def test_bounds_and_descents_are_the_same_by_both(monkeypatch):
    graph = gpt2(layers=1)
    wiring = Wiring.of(graph)
    target = int(0.5 * simulate(graph, store_all(graph)).peak_bytes)
    everything = trace(wiring, np.arange(wiring.op_count))
    results = []
    for few in (0, 10**9):
        monkeypatch.setattr(bounds, "FEW_ARCS", few)
        monkeypatch.setattr(descent, "FEW_ARCS", few)
        lower = descent.replay(wiring, everything, target)
        results.append((bounds.bottleneck(wiring), lower.peak_bytes, lower.sequence.tolist()))
    assert results[0] == results[1]
    assert results[0][1] < everything.peak_bytes
