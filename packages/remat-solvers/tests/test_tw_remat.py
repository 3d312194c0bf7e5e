import dataclasses
import subprocess
import sys

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_cases.answers import peak_of
from solver_cases.feed_forward import feed_forward
from solver_cases.random_graphs import graphs, trainings
from solver_cases.synthetic import gpt2

from remat_graph import Compute, Graph, Op, Status, Value, simulate
from remat_solvers import (
    BudgetTooSmall,
    InvalidProblem,
    Limit,
    Problem,
    UnsuitableSolver,
    get_solver,
    solve,
)
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.published.baselines.xla_greedy import XLAGreedy, greedy_sequence
from remat_solvers.published.decompositions.decomposition import (
    Precedence,
    Tree,
    balanced_bag,
    path_of,
    shrink_path,
    tree_of,
    without_bag,
)
from remat_solvers.published.decompositions.pw_remat import PathRecursion, PWRemat
from remat_solvers.published.decompositions.recursion import playable
from remat_solvers.published.decompositions.tw_remat import TreeRecursion, TWRemat

SOLVERS = ["tw-remat", "pw-remat", "xla-greedy"]
RECURSIONS = [TreeRecursion, PathRecursion]


def run(solver, graph, budget, seconds=None, report=lambda progress: None):
    return solver.solve(Problem(graph, budget), Limit.starting_now(seconds), report)


def check(graph, budget, solution):
    if solution.schedule is None:
        assert solution.status is Status.LIMIT
        assert solution.peak_bytes > budget
        return
    timeline = simulate(graph, solution.schedule)
    assert timeline.peak_bytes == solution.peak_bytes <= budget
    assert timeline.time == solution.time
    once = solution.time <= graph.time
    assert (solution.status, solution.lower_bound) == (
        (Status.OPTIMAL, graph.time) if once else (Status.FEASIBLE, None)
    )
    computed = {step.op for step in solution.schedule if isinstance(step, Compute)}
    assert computed == {op.name for op in graph.ops}


@settings(max_examples=32, deadline=None)
@given(
    st.one_of(graphs(most_ops=12, most_values=16), trainings(most_depth=7)),
    st.floats(0.2, 1.1),
    st.sampled_from([TWRemat(), TWRemat(2), PWRemat(), PWRemat(3), XLAGreedy()]),
)
def test_whatever_comes_out_holds(graph, fraction, solver):
    budget = max(1, int(peak_of(graph) * fraction))
    check(graph, budget, run(solver, graph, budget))


@settings(max_examples=32, deadline=None)
@given(graphs(most_ops=12, most_values=16), st.integers(1, 6), st.sampled_from(RECURSIONS))
def test_orders_are_legal_at_every_recursion_limit(graph, k, recursion):
    wiring = Wiring.of(graph)
    order = recursion(Precedence.of(wiring)).order(k, 100_000)
    sequence = playable(wiring, order)
    assert set(sequence.tolist()) == set(range(wiring.op_count))
    simulate(graph, expand(wiring, sequence))


@settings(max_examples=24, deadline=None)
@given(graphs(most_ops=14, most_values=20))
def test_decompositions_are_decompositions(graph):
    precedence = Precedence.of(Wiring.of(graph))
    nodes = len(precedence.before)
    tree = tree_of(precedence)
    edges = [(i, j) for i, row in enumerate(tree.neighbours) for j in row]
    check_decomposition(precedence.undirected(), tree.bags, edges)
    assert len(edges) == 2 * (len(tree.bags) - 1)
    assert len(tree.bags) <= nodes
    path = path_of(precedence)
    steps = [(i, i + 1) for i in range(len(path) - 1)]
    check_decomposition(precedence.undirected(spine=True), path, steps)
    assert len(path) <= nodes


def check_decomposition(graph, bags, edges):
    links = nx.Graph()
    links.add_nodes_from(range(len(bags)))
    links.add_edges_from(edges)
    assert nx.is_connected(links)
    for a, b in graph.edges:
        assert any({a, b} <= bag for bag in bags)
    for node in graph:
        holding = [i for i, bag in enumerate(bags) if node in bag]
        assert nx.is_connected(links.subgraph(holding))
    assert not any(bags[a] <= bags[b] for a, b in edges if a != b)


@settings(max_examples=24, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=0, max_size=30))
def test_a_balanced_bag_halves_any_tree(parents):
    links = nx.empty_graph(len(parents) + 1)
    links.add_edges_from((i + 1, p % (i + 1)) for i, p in enumerate(parents))
    tree = Tree(tuple(frozenset({i}) for i in links), tuple(tuple(sorted(links[i])) for i in links))
    parts = without_bag(tree, balanced_bag(tree))
    assert sum(len(part.bags) for part in parts) == len(parents)
    assert all(2 * len(part.bags) <= len(tree.bags) for part in parts)


def test_shrinking_a_path_leaves_no_bag_within_its_neighbour():
    bags = [frozenset(s) for s in ("a", "ab", "b", "bc", "abcd", "cd", "", "e")]
    assert shrink_path(bags) == (frozenset("abcd"), frozenset("e"))


@pytest.mark.parametrize(("recursion", "most_width"), list(zip(RECURSIONS, [4, 8], strict=True)))
def test_deep_networks_have_narrow_decompositions_and_small_peaks(recursion, most_width):
    """Figures 2 and 3 of the paper: far less than linear, at a length of a few times."""
    peaks, lengths = [], []
    for depth in (10, 25, 50, 100):
        graph = feed_forward(depth)
        wiring = Wiring.of(graph)
        found = recursion(Precedence.of(wiring))
        assert found.width <= most_width
        timeline = simulate(graph, expand(wiring, playable(wiring, found.order(1, 10**6))))
        peaks.append(timeline.peak_bytes)
        lengths.append(timeline.time / graph.time)
    assert peaks[-1] <= 2.5 * peaks[0]
    assert peaks[-1] < peak_of(feed_forward(100)) / 8
    assert lengths[-1] < 7


def test_the_greedy_heuristic_stays_linear():
    least = {}
    for depth in (20, 40, 80):
        graph = feed_forward(depth)
        wiring = Wiring.of(graph)
        sequence = greedy_sequence(wiring, 0)
        peak = simulate(graph, expand(wiring, sequence)).peak_bytes
        assert len(sequence) <= 2 * len(graph.ops)
        assert peak < peak_of(graph)
        least[depth] = peak
    assert least[80] - least[40] == 2 * (least[40] - least[20]) >= 40


def test_the_recursion_limit_trades_time_for_memory():
    graph = feed_forward(60)
    wiring = Wiring.of(graph)
    found = TreeRecursion(Precedence.of(wiring))
    points = []
    for k in (1, found.bag_count // 4, found.bag_count + 1):
        timeline = simulate(graph, expand(wiring, playable(wiring, found.order(k, 10**6))))
        points.append((timeline.peak_bytes, timeline.time))
    peaks, times = zip(*points, strict=True)
    assert peaks[0] < peaks[1] < peaks[2]
    assert times[0] > times[1] > times[2] == graph.time


@pytest.mark.parametrize("name", SOLVERS)
def test_a_transformer_is_brought_within_a_budget(name):
    graph = gpt2(layers=2)
    budget = int(peak_of(graph) * 0.75)
    solution = solve(graph, budget, solver=name)
    check(graph, budget, solution)
    assert solution.time > graph.time
    assert solution.lower_bound is None
    roomy = solve(graph, 2 * peak_of(graph), solver=name)
    assert roomy.time == graph.time


@pytest.mark.parametrize("name", SOLVERS)
def test_what_does_not_fit_is_too_small(name):
    graph = feed_forward(12)
    with pytest.raises(BudgetTooSmall):
        solve(graph, 2, solver=name)
    reports = []
    assert run(get_solver(name), graph, 2, report=reports.append).status is Status.LIMIT
    assert {report.solver for report in reports} == {name}


@pytest.mark.parametrize("name", SOLVERS)
def test_odd_graphs(name):
    one = Graph((Value("x", 1), Value("a", 3)), (Op("f", ("x",), ("a",), 1.0, 2),), {"x"}, {"a"})
    assert solve(one, 5, solver=name).peak_bytes == 5
    empty = Graph((Value("x", 1),), (), frozenset({"x"}), frozenset())
    with pytest.raises(UnsuitableSolver, match="no ops"):
        solve(empty, 5, solver=name)
    values = tuple(Value(f"v{i}", i % 2) for i in range(6))
    apart = Graph(
        values,
        tuple(
            Op(f"op{i}", (f"v{i - 1}",) if i % 3 else (), (f"v{i}",), 0.0) for i in range(6)
        ),
        frozenset(),
        frozenset({"v2", "v5"}),
    )  # fmt: skip
    check(apart, 3, solve(apart, 3, solver=name))


@pytest.mark.parametrize("recursion", RECURSIONS)
def test_what_is_not_replayable_runs_once_and_orders_are_kept(recursion):
    graph = feed_forward(20)
    ops = list(graph.ops)
    for i, op in enumerate(ops):
        once = op.name in {"relu3", "product7", "relu15"}
        after = ("loss",) if op.name == "loss.back" else ()
        ops[i] = dataclasses.replace(op, replayable=not once, order_after=after)
    graph = Graph(graph.values, tuple(ops), graph.resident, graph.results, graph.boundary)
    wiring = Wiring.of(graph)
    order = recursion(Precedence.of(wiring)).order(1, 10**6)
    sequence = playable(wiring, order)
    simulate(graph, expand(wiring, sequence))
    counts = np.bincount(sequence)
    assert counts[graph.op_index["product7"]] == 1 < counts.max()


@pytest.mark.parametrize("solver", [TWRemat, PWRemat])
@pytest.mark.parametrize("k", [0, -1, "x", 1.5, True])
def test_the_recursion_limit_is_a_whole_number(solver, k):
    with pytest.raises(InvalidProblem, match=r"k=.*whole number, 1 or more"):
        solver(k)


def test_no_time_still_tries_once():
    graph = feed_forward(10)
    solution = run(TWRemat(), graph, peak_of(graph), seconds=0)
    assert solution.time == graph.time


def test_schedules_too_long_are_given_up():
    precedence = Precedence.of(Wiring.of(feed_forward(30)))
    for recursion in RECURSIONS:
        assert recursion(precedence).order(1, 100) is None


@pytest.mark.sweep
def test_these_solvers_need_no_torch_and_no_sibling():
    code = (
        "import sys, remat_solvers\n"
        "for name in ('rotor', 'tw-remat', 'pw-remat', 'xla-greedy'):\n"
        "    assert remat_solvers.get_solver(name).name == name\n"
        "seen = {m.split('.')[0] for m in sys.modules}\n"
        "print(seen & {'torch', 'remat', 'remat_partition', 'remat_exec'})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
