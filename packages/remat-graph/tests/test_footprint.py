"""A footprint is the simulator's account of one schedule, for any sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from remat_graph import Compute, Footprint, Free, Graph, InvalidSchedule, Schedule, simulate


def legal_schedule(data, graph):
    """Draw a schedule with replays and early frees; the results are made anew at the end."""
    moves = [*(Compute(op.name) for op in graph.ops), *(Free(v.name) for v in graph.values)]
    steps = []
    for _ in range(data.draw(st.integers(0, 15)) if moves else 0):
        step = data.draw(st.sampled_from(moves))
        if goes_on(graph, [*steps, step]):
            steps.append(step)
    for op in graph.ops:
        if goes_on(graph, [*steps, Compute(op.name)]):
            steps.append(Compute(op.name))
    return Schedule(tuple(steps))


def goes_on(graph, steps):
    """Whether a schedule that begins so is refused at its end at most."""
    try:
        simulate(graph, Schedule(tuple(steps)))
    except InvalidSchedule as error:
        return error.step is None
    return True


@settings(max_examples=100)
@given(data=st.data())
def test_it_is_what_the_simulator_says_for_any_sizes(any_graphs, data):
    graph = data.draw(any_graphs())
    schedule = legal_schedule(data, graph)
    try:
        footprint = Footprint(graph, schedule)
    except InvalidSchedule:
        assume(False)
    new = {value.size_bytes: data.draw(st.integers(0, 50)) for value in graph.values}
    sizes = [new[value.size_bytes] for value in graph.values]  # what is overwritten is as large
    workspaces = [data.draw(st.integers(0, 50)) for _ in graph.ops]
    other = replace(
        graph,
        values=tuple(
            replace(value, size_bytes=size) for value, size in zip(graph.values, sizes, strict=True)
        ),
        ops=tuple(
            replace(op, workspace_bytes=size)
            for op, size in zip(graph.ops, workspaces, strict=True)
        ),
    )
    timeline = simulate(other, schedule)
    computes = [at for at, step in enumerate(schedule) if isinstance(step, Compute)]
    held = footprint.held_bytes(sizes, workspaces)
    assert held == [timeline.during_bytes[at] for at in computes]
    assert max(held, default=0) == timeline.peak_bytes
    assert [graph.ops[op].name for op in footprint.ops] == [
        schedule.steps[at].op for at in computes
    ]


def test_a_schedule_that_is_not_legal_has_none(diamond: Graph) -> None:
    with pytest.raises(InvalidSchedule):
        Footprint(diamond, Schedule((Compute("nothing"),)))
