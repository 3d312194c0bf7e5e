"""A step of several regions as one: what its calls and moments add up to, and its curve."""

from dataclasses import replace
from random import Random

import pytest

from remat.plans.regions import peak_of
from remat.plans.whole_step import WholeStep
from remat.report.curve import curve_of_step
from remat_graph import Compute, simulate
from remat_graph.testing import random_training
from remat_solvers import store_all
from remat_solvers.step import TimeStep, measure_option, region_front


def region(random):
    """A random graph whose boundary stands for the rest of the step, with its options.

    Some of what its forward makes is handed out, and let go of before its backward.
    """
    graph = random_training(random)
    made = [value for op in graph.ops[: graph.boundary_index] for value in op.outputs]
    written = {value for op in graph.ops for pair in op.overwrites for value in pair}
    let_go = [value for value in made if value not in written and random.random() < 0.5]
    ops = tuple(
        replace(op, inputs=tuple(dict.fromkeys((*op.inputs, *let_go))), replayable=False,
                overwrites=())
        if op.name == graph.boundary
        else op
        for op in graph.ops
    )  # fmt: skip
    values = tuple(
        replace(value, size_bytes=3 * value.size_bytes) if value.name in let_go else value
        for value in graph.values
    )
    graph = replace(graph, values=values, ops=ops, results=graph.results - frozenset(let_go))
    front = region_front(graph, limit_seconds=0.1)
    everything = measure_option(front.graph, store_all(front.graph))
    return front.with_([everything], ()), everything


def moments_of(random, calls):
    """Moments of a step whose calls are nested, side by side, or have no backward."""
    waiting, live, left, moments = list(range(calls)), [], [], []

    def moment(running=None):
        others = [call for call in (*live, *left) if running is None or call != running[0]]
        moments.append(TimeStep(random.randrange(40), tuple((c, 1) for c in others), running))

    while waiting or live:
        moment()
        if waiting and (not live or random.random() < 0.6):
            call = waiting.pop(0)
            moment((call, "forward"))
            live.append(call)
        elif random.random() < 0.8:
            moment((live[-1], "backward"))
            live.pop()
        else:
            left.append(live.pop())  # no gradient comes: it is held to the end
    return tuple(moments)


@pytest.mark.parametrize("seed", range(12))
def test_the_simulator_says_what_the_calls_add_up_to(seed):
    random = Random(seed)
    known = [region(random) for _ in range(2)]
    calls = [random.choice(known) for _ in range(4)]
    moments = moments_of(random, len(calls))
    whole = WholeStep(moments, tuple(front.graph for front, _ in calls))
    for options in (
        [everything for _, everything in calls],
        [random.choice(front.options) for front, _ in calls],
    ):
        schedule = whole.schedule([option.schedule for option in options])
        timeline = simulate(whole.graph, schedule)
        assert timeline.peak_bytes == peak_of(moments, options)
        assert timeline.after_bytes[-1] == 0
        ran = {m.running for m in moments if m.running}
        time = sum(
            front.graph.ops[front.graph.op_index[step.op]].time
            for call, (option, (front, _)) in enumerate(zip(options, calls, strict=True))
            for half, steps in halves(front.graph, option.schedule).items()
            for step in steps
            if (call, half) in ran and isinstance(step, Compute)
        )
        assert timeline.time == pytest.approx(time)


def halves(graph, schedule):
    at = schedule.steps.index(Compute(graph.boundary))
    return {"forward": schedule.steps[:at], "backward": schedule.steps[at:]}


def test_a_half_without_its_forward_or_met_twice_is_left_out():
    front, everything = region(Random(0))
    record = (
        TimeStep(1, (), (0, "backward")),
        TimeStep(2, (), (0, "forward")),
        TimeStep(3, (), (0, "forward")),
        TimeStep(4, (), (0, "backward")),
    )
    whole = WholeStep(record, (front.graph,))
    timeline = simulate(whole.graph, whole.schedule([everything.schedule]))
    assert timeline.time == pytest.approx(everything.time)


@pytest.mark.parametrize("seed", range(4))
def test_a_curve_falls_to_storing_everything(seed):
    random = Random(seed)
    known = [region(random) for _ in range(3)]
    fronts, everything = zip(*known, strict=True)
    ups = [TimeStep(5, tuple((c, 1) for c in range(at)), (at, "forward")) for at in range(3)]
    downs = [
        TimeStep(9, tuple((c, 1) for c in range(at)), (at, "backward")) for at in reversed(range(3))
    ]
    moments = (*ups, *downs)
    most = peak_of(moments, everything)
    curve = curve_of_step(fronts, moments, most, 2.0)
    budgets, times = zip(*curve.points, strict=True)
    assert list(budgets) == sorted(budgets)
    assert budgets[-1] == most
    assert list(times) == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(sum(front.graph.time for front in fronts))
    assert peak_of(moments, [front.options[0] for front in fronts]) >= budgets[0]
    assert not curve.bounds  # what a recorded step showed proves nothing
