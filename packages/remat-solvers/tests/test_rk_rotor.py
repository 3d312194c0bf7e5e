import dataclasses
import itertools
import math
import pickle
from collections import Counter
from concurrent.futures import Executor, Future

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.answers import check_of_chain, peak_of
from solver_cases.chains import chains, with_frees
from solver_cases.random_graphs import graphs
from solver_cases.synthetic import gpt2

from remat_graph import Graph, Op, Stage, Status, Value, simulate
from remat_solvers import Limit, Problem, solve
from remat_solvers.chains.chain import Chain, ChainStage, find_chains, merged
from remat_solvers.chains.costs import measure_stages
from remat_solvers.chains.program import fastest, least_bytes
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Wiring
from remat_solvers.published.hierarchical.hilp.planner import LevelPlanner
from remat_solvers.published.hierarchical.rk_rotor import RKRotor
from remat_solvers.published.hierarchical.rk_rotor.options import StagePlans
from remat_solvers.published.rotor import Rotor
from remat_solvers.search.evict import evict
from remat_solvers.testing.brute_force import fastest as fastest_of_all

thorough = settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow])
few, times = st.integers(0, 6), st.integers(0, 9).map(float)


def run(solver, graph, budget, seconds=None, executor=None):
    problem = Problem(graph, budget, executor=executor)
    return solver.solve(problem, Limit.starting_now(seconds), lambda progress: None)


@st.composite
def deep_chains(draw, most_stages=3, most_inner=3, extras=False):
    """Stages of several ops: a0.0 -> a0.1 -> ... ; the last one of each goes on.

    Backward ops read inner values, the input of the stage, and gradients. With `extras` some ops
    run once only and some inner values are results.
    """
    values, ops, results = [Value("x", 3)], [], set()
    stages = []
    before = "x"
    for s in range(draw(st.integers(1, most_stages))):
        source, inner = before, []
        for i in range(draw(st.integers(1, most_inner))):
            name = f"a{s}.{i}"
            values.append(Value(name, draw(few)))
            reads = dict.fromkeys([inner[-1] if inner else source])
            reads.update(dict.fromkeys(v for v in [source, *inner] if draw(st.booleans())))
            workspace = draw(st.sampled_from([0, 0, 3]))
            once = extras and draw(st.sampled_from([False, False, False, True]))
            op = Op(f"f{s}.{i}", tuple(reads), (name,), draw(times), workspace, replayable=not once)
            ops.append(op)
            inner.append(name)
            if extras and draw(st.sampled_from([False, False, False, True])):
                results.add(name)
        stages.append((source, inner))
        before = inner[-1]
    grad = None
    for s, (source, inner) in reversed(list(enumerate(stages))):
        entering = grad
        for i in reversed(range(len(inner))):
            reads = [v for v in [source, *inner] if draw(st.booleans())]
            reads += [grad] if grad else []
            if entering not in (grad, None) and draw(st.booleans()):
                reads.append(entering)
            grad = f"g{s}.{i}"
            values.append(Value(grad, draw(few)))
            made = [grad]
            if draw(st.booleans()):
                made.append(f"w{s}.{i}")
                values.append(Value(made[-1], draw(st.integers(0, 3))))
                results.add(made[-1])
            workspace, twin = draw(st.sampled_from([0, 0, 3])), f"f{s}.{i}"
            made, reads = tuple(made), tuple(reads)
            name, back = f"b{s}.{i}", draw(times)
            ops.append(Op(name, reads, made, back, workspace, Stage.BACKWARD, twin))
    forward = sum(len(inner) for _, inner in stages)
    return Graph(
        tuple(values), tuple(ops), frozenset({"x"}), frozenset({*results, grad}), ops[forward].name
    )


def intended_chain(graph):
    """Cut a graph of `deep_chains` without extras into the stages it was made of."""
    wiring = Wiring.of(graph)
    stages = []
    for _, group in itertools.groupby(
        range(graph.boundary_index), lambda op: graph.ops[op].name.split(".")[0]
    ):
        forward = tuple(group)
        number = graph.ops[forward[0]].name.split(".")[0][1:]
        backward = tuple(
            op for op in range(len(graph.ops)) if graph.ops[op].name.startswith(f"b{number}.")
        )
        stages.append(ChainStage(forward, backward, wiring.outputs[forward[-1]][0]))
    stages[-1] = dataclasses.replace(stages[-1], carried=None)
    return Chain(tuple(stages), frozenset())


def dropping(wiring, stage, dropped, retain):
    """Make the option that drops values between the halves, and computes them when needed.

    What is computed again stays there (`retain`), or is computed again at every use.
    """
    gone = set(dropped)
    backward: list[int] = []

    def bring(v, have):
        if v in gone and v not in have:
            for u in wiring.inputs[wiring.producer_list[v]]:
                bring(u, have)
            backward.append(wiring.producer_list[v])
            have.update(wiring.outputs[wiring.producer_list[v]])

    kept: set[int] = set()
    for op in stage.backward:
        have = kept if retain else set()
        for v in wiring.inputs[op]:
            bring(v, have)
        backward.append(op)
    return stage.forward, tuple(backward)


def droppable(wiring, stage):
    return [v for op in stage.forward if wiring.replayable_list[op] for v in wiring.outputs[op]]


@st.composite
def with_options(draw, wiring, chain, most=2):
    """Draw up to `most` options for each stage."""
    options = []
    for stage in chain.stages:
        values = droppable(wiring, stage)
        subsets = st.sets(st.sampled_from(values)) if values else st.just(set())
        drawn = [
            dropping(wiring, stage, draw(subsets), draw(st.booleans()))
            for _ in range(draw(st.integers(0, most)))
        ]
        options.append(tuple(drawn))
    return options


def lead(wiring, ops, wanted):
    """List the ops among these that lead to values (each op at most once in `ops`)."""
    producer = {v: op for op in ops for v in wiring.outputs[op]}
    chosen: set[int] = set()
    waiting = [v for v in wanted if v in producer]
    while waiting:
        op = producer[waiting.pop()]
        if op not in chosen:
            chosen.add(op)
            waiting += [v for v in wiring.inputs[op] if v in producer]
    return [op for op in ops if op in chosen]


def persistent_sequences(wiring, chain, options, s, t, first=True):
    """Enumerate what runs s..t forward and backward by the moves of rk-rotor."""
    stage = chain.stages[s]
    for forward, backward in dict.fromkeys([(stage.forward, stage.backward), *options[s]]):
        there: set[int] = set()
        saved = set()
        for op in backward:
            saved.update(v for v in wiring.inputs[op] if v not in there)
            there.update(wiring.outputs[op])
        own = {v for op in forward for v in wiring.outputs[op]}
        onward = set() if s == t else {stage.carried}
        ahead = list(forward) if first else lead(wiring, forward, (saved & own) | onward)
        if s == t:
            yield [*ahead, *backward]
        else:
            for rest in persistent_sequences(wiring, chain, options, s + 1, t, first):
                yield [*ahead, *rest, *backward]
    for k in range(s + 1, t + 1):
        advance = [
            op
            for each in chain.stages[s:k]
            for op in (each.forward if first else lead(wiring, each.forward, [each.carried]))
        ]
        earlier = list(persistent_sequences(wiring, chain, options, s, k - 1, first=False))
        for later in persistent_sequences(wiring, chain, options, k, t, first):
            for again in earlier:
                yield [*advance, *later, *again]


def peak_and_time(graph, sequence):
    timeline = simulate(graph, with_frees(graph, [graph.ops[op].name for op in sequence]))
    return timeline.peak_bytes, timeline.time


def program(wiring, costs, budget):
    found = fastest(costs, budget, budget, math.inf)
    return None if found is None else np.array(found, dtype=np.int64)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(deep_chains(), st.data())
def test_the_programme_equals_the_enumeration_of_its_moves(graph, data):
    wiring, chain = Wiring.of(graph), intended_chain(graph)
    options = data.draw(with_options(wiring, chain))
    costs = measure_stages(wiring, chain, options)
    last = len(chain.stages) - 1
    truth = {
        peak_and_time(graph, sequence)
        for sequence in persistent_sequences(wiring, chain, options, 0, last)
    }
    budgets = sorted({max(1, peak + more) for peak, _ in truth for more in (-1, 0)})
    for budget in budgets:
        best = min((time for peak, time in truth if peak <= budget), default=None)
        found = program(wiring, costs, budget)
        assert (found is None) == (best is None)
        if found is not None:
            assert sequence_time(wiring, found) == pytest.approx(best)
    assert max(1, least_bytes(costs)) == max(1, min(peak for peak, _ in truth))


@thorough
@given(deep_chains(extras=True), st.integers(1, 4), st.data())
def test_no_figure_is_below_the_trace(graph, most_stages, data):
    """With every budget in bytes: one byte too few would show at the budget that just fits."""
    wiring = Wiring.of(graph)
    found = find_chains(wiring)
    if isinstance(found, str):
        return
    chain = merged(wiring, found[0], most_stages)
    options = data.draw(with_options(wiring, chain))
    costs = measure_stages(wiring, chain, options)
    least = max(1, least_bytes(costs))
    assert least == 1 or program(wiring, costs, least - 1) is None
    for budget in range(least, peak_of(graph) + 3):
        sequence = program(wiring, costs, budget)
        assert sequence is not None
        assert trace(wiring, sequence).peak_bytes <= budget
        times_run = Counter(sequence.tolist())
        assert all(times_run[op] for op in range(wiring.op_count))
        once = [op for op in range(wiring.op_count) if not wiring.replayable_list[op]]
        assert all(times_run[op] == 1 for op in once)
        simulate(graph, with_frees(graph, [graph.ops[op].name for op in sequence]))


@thorough
@given(chains(most_stages=5), st.floats(0.3, 1.1), st.sampled_from([3, 50, 500]))
def test_storing_everything_alone_is_rotor(graph, fraction, slots):
    budget = max(1, int(peak_of(graph) * fraction))
    plain = run(Rotor(slots=slots), graph, budget)
    one = run(RKRotor(slots=slots, most_options=1), graph, budget)
    assert (one.schedule, one.status, one.time) == (plain.schedule, plain.status, plain.time)
    assert one.peak_bytes == plain.peak_bytes


def only_store_all(level, budget_bytes, seconds):
    return [np.arange(level.wiring.op_count)]


@pytest.mark.parametrize("fraction", [0.8, 0.6, 0.5, 0.4])
def test_a_planner_that_knows_one_option_gives_rotor(fraction):
    graph = gpt2(layers=2)
    budget = int(peak_of(graph) * fraction)
    wiring = Wiring.of(graph)
    chain = find_chains(wiring)[0]
    options = StagePlans(wiring, only_store_all, 1, None).of(chain, 1.0)
    assert all(
        option == (s.forward, s.backward)
        for s, o in zip(chain.stages, options, strict=True)
        for option in o
    )
    plain = fastest(measure_stages(wiring, chain), budget, 500, math.inf)
    assert fastest(measure_stages(wiring, chain, options), budget, 500, math.inf) == plain


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(deep_chains(most_stages=2, most_inner=2, extras=True), st.floats(0.3, 1.1))
def test_never_over_budget_never_slower_than_rotor_never_below_the_truth(graph, fraction):
    budget = max(1, int(peak_of(graph) * fraction))
    if RKRotor().can_solve(Problem(graph, budget)) is not None:
        return
    solution = run(RKRotor(), graph, budget, seconds=4)
    check_of_chain(graph, budget, solution)
    plain = run(Rotor(), graph, budget)
    assert plain.schedule is None or solution.time <= plain.time
    if solution.schedule is not None:
        best = fastest_of_all(graph, budget)
        assert best is not None
        assert solution.time >= best * (1 - 1e-9)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(most_ops=9), st.floats(0.3, 1.1))
def test_what_it_takes_it_schedules(graph, fraction):
    budget = max(1, int(peak_of(graph) * fraction))
    if RKRotor().can_solve(Problem(graph, budget)) is None:
        check_of_chain(graph, budget, run(RKRotor(), graph, budget, seconds=4))


def by_eviction(level, budget_bytes, seconds):
    """Plan a block in moments, with the same answer at any speed."""
    found = evict(level.wiring, np.arange(level.wiring.op_count), budget_bytes)
    return [found.sequence] if found.peak_bytes <= budget_bytes else []


@pytest.mark.sweep
def test_options_inside_blocks_pay_on_a_transformer():
    graph = gpt2(layers=3)
    budget = int(peak_of(graph) * 0.6)
    plain = run(Rotor(), graph, budget, seconds=NO_LIMIT)
    solution = run(RKRotor(planner=by_eviction), graph, budget, seconds=NO_LIMIT)
    check_of_chain(graph, budget, solution)
    bound = solve(graph, budget, solver="refine", limit_seconds=1).lower_bound
    assert bound <= solution.time
    assert solution.time - graph.time < 0.8 * (plain.time - graph.time)


def test_options_reach_below_the_least_budget_of_rotor():
    """A stage whose inner values do not fit together can be run with an option alone."""
    values = (*(Value(v, 4) for v in "abcd"), *(Value(v, 1) for v in "xghij"))
    ops = (
        Op("f0", ("x",), ("a",), 1.0),
        Op("f1", ("a",), ("b",), 1.0),
        Op("f2", ("b",), ("c",), 1.0),
        Op("f3", ("c",), ("d",), 1.0),
        Op("b3", ("d", "c"), ("g",), 1.0, stage=Stage.BACKWARD, twin="f3"),
        Op("b2", ("g", "a"), ("h",), 1.0, stage=Stage.BACKWARD, twin="f2"),
        Op("b1", ("h", "b"), ("i",), 1.0, stage=Stage.BACKWARD, twin="f1"),
        Op("b0", ("i",), ("j",), 1.0, stage=Stage.BACKWARD, twin="f0"),
    )
    graph = Graph(values, ops, frozenset({"x"}), frozenset({"j"}), "b3")
    least = run(Rotor(), graph, 1).peak_bytes
    solution = run(RKRotor(), graph, least - 1, seconds=5)
    assert solution.status is Status.FEASIBLE
    check_of_chain(graph, least - 1, solution)


class Counting(Executor):
    """Runs at once what can travel, and notes the seconds that it was given."""

    def __init__(self):
        self.shares = []

    def submit(self, function, /, *arguments):
        arguments = pickle.loads(pickle.dumps(arguments))
        self.shares.append(arguments[-1])
        future: Future = Future()
        future.set_result(function(*arguments))
        return future


def test_identical_stages_are_planned_once_through_the_executor():
    graph = gpt2(layers=4)
    wiring = Wiring.of(graph)
    executor = Counting()
    plans = StagePlans(wiring, only_store_all, 4, executor)
    chain = find_chains(wiring)[0]
    seconds = 8.0
    options = plans.of(chain, seconds)
    inner = [s for s in chain.stages if len(s.forward) > 1 and s.backward]
    assert 0 < len(executor.shares) < len(inner)
    assert sum(executor.shares) <= seconds * (1 + 1e-9)
    assert [len(o) > 0 for o in options] == [s in inner for s in chain.stages]
    before = len(executor.shares)
    assert plans.of(chain, seconds) == options
    assert len(executor.shares) == before


@pytest.mark.sweep
def test_options_of_identical_stages_are_translated():
    graph = gpt2(layers=3)
    wiring = Wiring.of(graph)
    chain = find_chains(wiring)[0]
    options = StagePlans(wiring, LevelPlanner(), 8, None).of(chain, 3.0)
    assert max(map(len, options)) > 2
    for stage, found in zip(chain.stages, options, strict=True):
        for forward, backward in found:
            assert set(forward) == set(stage.forward)
            assert set(backward) >= set(stage.backward)
            assert set(backward) <= {*stage.forward, *stage.backward}


def test_without_time_it_says_limit():
    graph = gpt2(layers=2)
    budget = int(peak_of(graph) * 0.6)
    assert run(RKRotor(), graph, budget, seconds=0).status is Status.LIMIT


def test_graphs_that_are_no_chain_are_refused_with_the_reason():
    values = (Value("x", 1), Value("a", 2))
    graph = Graph(values, (Op("f", ("x",), ("a",), 1.0),), frozenset({"x"}), frozenset({"a"}))
    reason = RKRotor().can_solve(Problem(graph, 100))
    assert reason is not None
    assert "backward half begins" in reason
