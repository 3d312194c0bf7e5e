from functools import cache
from math import comb, isqrt

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases.answers import peak_of
from solver_cases.random_graphs import graphs, trainings
from solver_cases.synthetic import gpt2

from remat_graph import Compute, Graph, Op, Stage, Status, Value, simulate
from remat_graph.testing import unit_chain
from remat_solvers import Limit, Problem, UnsuitableSolver, get_solver, list_solvers, solve
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring
from remat_solvers.published.baselines.forward import articulation_ops
from remat_solvers.published.baselines.griewank import keep_snapshots
from remat_solvers.published.baselines.segments import every_root, greedy_choices, keep_segments
from remat_solvers.published.checkmate.stages import Stages

CHAINS = ("chen-sqrt", "chen-greedy", "griewank")
GENERAL = ("ap-sqrt", "ap-greedy", "linearized-sqrt", "linearized-greedy", "last-node")
SWEPT = ("chen-greedy", "griewank", "ap-greedy", "linearized-greedy")


def stages_of(graph: Graph) -> Stages:
    return Stages.of(Wiring.of(graph))


def runs(schedule) -> list[str]:
    return [step.op for step in schedule if isinstance(step, Compute)]


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(graphs(), trainings(12), trainings()), st.floats(0.3, 1.1))
def test_every_schedule_is_legal_and_fits(graph, share):
    problem = Problem(graph, max(1, int(share * peak_of(graph))))
    for name in (*CHAINS, *GENERAL):
        solver = get_solver(name)
        reason = solver.can_solve(problem)
        if reason is not None:
            assert graph.boundary_index == len(graph.ops) or name in CHAINS
            continue
        solution = solver.solve(problem, Limit.starting_now(5), lambda progress: None)
        assert (solution.solver, solution.lower_bound or graph.time) == (name, graph.time)
        if solution.schedule is None:
            assert solution.status in (Status.LIMIT, Status.INFEASIBLE)
            continue
        timeline = simulate(graph, solution.schedule)
        assert timeline.peak_bytes == solution.peak_bytes <= problem.budget_bytes
        assert timeline.time == solution.time >= graph.time
        assert (solution.status is Status.OPTIMAL) == (solution.time <= graph.time * (1 + 1e-6))


@cache
def fewest_advances(steps: int, snapshots: int) -> int:
    """Griewank's recurrence, the input counted as a snapshot."""
    if steps <= 1:
        return 0
    if snapshots == 1:
        return steps * (steps - 1) // 2
    return min(
        m + fewest_advances(steps - m, snapshots - 1) + fewest_advances(m, snapshots)
        for m in range(1, steps)
    )


def binomial_advances(steps: int, snapshots: int) -> int:
    rounds = 0
    while comb(snapshots + rounds, snapshots) < steps:
        rounds += 1
    return rounds * steps - comb(snapshots + rounds, snapshots + 1)


def test_griewank_has_the_binomial_counts():
    assert binomial_advances(10, 3) == 15
    for steps in range(2, 22):
        stages = stages_of(unit_chain(steps))
        for slots in range(steps):
            run = stages.least_run(keep_snapshots(stages, slots))
            now = trace(stages.wiring, stages.sequence(run))
            # The first steps - 1 advances are the forward half; the last step's state is there.
            forward = int((now.sequence < steps).sum())
            advances = forward - steps + (steps - 1)
            known = binomial_advances(steps, slots + 1)
            assert advances == known == fewest_advances(steps, slots + 1)
            assert now.peak_bytes <= slots + 2


def test_griewank_takes_the_slots_that_fit():
    graph = unit_chain(20)
    times = [solve(graph, budget, solver="griewank").time for budget in (20, 8, 5, 3)]
    assert times == sorted(times)
    assert times[0] == graph.time < times[1]
    slots = 5 - 2
    assert times[2] == graph.time + binomial_advances(20, slots + 1) - 19


def test_chen_sqrt_on_a_unit_chain():
    steps = 25
    graph = unit_chain(steps)
    solution = solve(graph, 100, solver="chen-sqrt")
    again = [name for name in runs(solution.schedule) if name.startswith("f")]
    assert len(again) < 2 * steps
    assert solution.peak_bytes <= 2 * isqrt(steps) + 2
    assert every_root(range(25)) == [4, 9, 14, 19, 24]


def test_greedy_segments_come_to_their_size():
    stages = stages_of(gpt2(layers=2))
    made = stages.wiring.output_bytes
    boundary = stages.wiring.graph.boundary_index
    candidates = range(0, boundary, 3)
    choices = greedy_choices(stages, candidates)
    assert len(choices) > 5
    for size, chosen in choices:
        assert set(chosen) <= set(candidates)
        for since, until in zip([-1, *chosen], chosen, strict=False):
            inside = [op for op in candidates if since < op < until]
            assert sum(made[since + 1 : until + 1]) > size
            assert all(sum(made[since + 1 : op + 1]) <= size for op in inside)


def test_checkpoints_are_not_computed_again_and_segments_once():
    graph = unit_chain(12)
    stages = stages_of(graph)
    run = stages.least_run(keep_segments(stages, [3, 7]))
    counts = run[:, :12].sum(axis=0).tolist()
    assert counts == [2, 2, 2, 1, 2, 2, 2, 1, 1, 1, 1, 1]


@settings(max_examples=24, deadline=None)
@given(graphs(most_ops=10, most_values=14))
def test_articulation_ops_are_those_that_cut(graph):
    count = graph.boundary_index
    edges = {
        (graph.producer[v], i)
        for i, op in enumerate(graph.ops[:count])
        for v in op.inputs
        if v in graph.producer
    }

    def pieces(ops: list[int]) -> int:
        group = {op: op for op in ops}
        for a, b in edges:
            if a in group and b in group:
                old, new = group[a], group[b]
                group = {op: new if g == old else g for op, g in group.items()}
        return len(set(group.values()))

    everything = list(range(count))
    cuts = [
        op for op in everything if pieces([o for o in everything if o != op]) > pieces(everything)
    ]
    assert articulation_ops(Wiring.of(graph)) == cuts


def test_the_residual_stream_is_what_ap_keeps():
    graph = gpt2(layers=4)
    cuts = [graph.ops[i].name for i in articulation_ops(Wiring.of(graph))]
    assert {"h0.res1", "h0.res2", "h3.res2", "ln_f", "head"} <= set(cuts)
    assert not any(name.endswith((".qk", ".softmax", ".gelu", ".ln1")) for name in cuts)
    solution = solve(graph, int(0.6 * peak_of(graph)), solver="ap-greedy")
    forward = sum(op.time for op in graph.ops[: graph.boundary_index])
    assert graph.time < solution.time <= graph.time + forward


def test_last_node_keeps_next_to_nothing():
    graph = unit_chain(8)
    solution = solve(graph, 100, solver="last-node")
    assert solution.peak_bytes <= 3
    assert runs(solution.schedule).count("f0") == 8
    assert solution.time == graph.time + sum(range(8))
    with pytest.raises(UnsuitableSolver, match="more than 2,000"):
        solve(unit_chain(1001), 10, solver="last-node")


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_no_chain_is_refused_with_the_op(name):
    with pytest.raises(UnsuitableSolver, match=r"chains, and forward op 'h0\.split\.1' reads"):
        solve(gpt2(layers=1), 10**9, solver=name)


@pytest.mark.parametrize("name", [*CHAINS, *GENERAL])
def test_edges(name):
    one = Graph((Value("a", 1),), (Op("f", (), ("a",), 1.0),))
    with pytest.raises(UnsuitableSolver, match="no forward or no backward half"):
        solve(one, 10, solver=name)
    with pytest.raises(UnsuitableSolver, match="no ops"):
        solve(Graph((), ()), 10, solver=name)
    two = Graph(
        (Value("a", 1), Value("b", 0)),
        (Op("f", (), ("a",), 1.0), Op("g", ("a",), ("b",), 0.0, stage=Stage.BACKWARD)),
        boundary="g",
    )
    assert solve(two, 1, solver=name).time == 1.0
    infeasible = get_solver(name).solve(
        Problem(unit_chain(6), 1), Limit.starting_now(1), lambda progress: None
    )
    assert infeasible.status is Status.INFEASIBLE


@pytest.mark.parametrize("name", SWEPT)
def test_a_sweep_stops_at_the_limit_and_meets_the_budget(name):
    graph = unit_chain(30, twins=False)
    reports = []
    problem = Problem(graph, 12)
    solution = get_solver(name).solve(problem, Limit.starting_now(0.0), reports.append)
    assert len(reports) == 1
    swept = solve(graph, 12, solver=name)
    assert swept.peak_bytes <= 12
    assert swept.time <= solution.time


def test_what_runs_only_once_is_kept():
    graph = unit_chain(10)
    fixed = tuple(
        Op(op.name, op.inputs, op.outputs, op.time, 0, op.stage, op.twin, None, op.name != "f4")
        for op in graph.ops
    )
    graph = Graph(graph.values, fixed, graph.resident, graph.results, graph.boundary)
    for name in (*CHAINS, *GENERAL):
        assert runs(solve(graph, 100, solver=name).schedule).count("f4") == 1


def test_all_are_registered_and_cite_a_paper():
    listed = list_solvers()
    for name in (*CHAINS, *GENERAL, "checkmate", "checkmate-rounding"):
        assert listed[name].distribution == "remat-solvers"
        solver = get_solver(name)
        assert (solver.name, solver.needs_hierarchy) == (name, False)
        assert any(year in solver.citation for year in ("2000", "2016", "2020"))


def test_disconnected_forward_halves():
    values = (Value("a", 4), Value("b", 4), Value("ga", 1), Value("gb", 1))
    ops = (
        Op("fa", (), ("a",), 1.0),
        Op("fb", (), ("b",), 1.0),
        Op("bb", ("b",), ("gb",), 1.0, stage=Stage.BACKWARD, twin="fb"),
        Op("ba", ("a",), ("ga",), 1.0, stage=Stage.BACKWARD, twin="fa"),
    )
    graph = Graph(values, ops, results=frozenset({"ga", "gb"}), boundary="bb")
    assert articulation_ops(Wiring.of(graph)) == []
    assert np.all(np.diag(stages_of(graph).least_run(np.zeros((5, 4), np.bool_))))
    assert solve(graph, 6, solver="last-node").time == 5.0
    assert solve(graph, peak_of(graph), solver="linearized-greedy").time == 4.0
