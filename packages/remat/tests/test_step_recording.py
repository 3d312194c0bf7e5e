"""What a recorded step says of one whose calls of regions run by other options."""

import pytest

from remat.budgets.auto import AutoBudget
from remat.planning.settings import Settings
from remat.plans.origin import Origin
from remat.session.kinds import RegionKind
from remat.session.near_kinds import Kinds
from remat.session.recording import Recorded, RecordedCall
from remat.session.step_planner import StepPlanner
from remat_graph import Compute, Free, Graph, Op, Schedule, Stage, Value
from remat_graph.torch import Mark
from remat_solvers import BudgetTooSmall
from remat_solvers.step import RegionFront, TimeStep, measure_option

X, Y, HELD = 100, 60, 1000  # bytes: of an input, of what is made of it, and held by others

GRAPH = Graph(
    values=[Value("x", X), Value("w", 10), Value("a", 400), Value("y", Y), Value("dy", Y),
            Value("dw", 10)],
    ops=[
        Op("f", ("x", "w"), ("a",), 1.0),
        Op("g", ("a",), ("y",), 1.0),
        Op("loss", ("y",), ("dy",), 0.0, stage=Stage.BACKWARD, replayable=False),
        Op("back", ("a", "dy"), ("dw",), 1.0, stage=Stage.BACKWARD),
    ],
    resident={"x", "w"},
    results={"dw"},
    boundary="loss",
)  # fmt: skip


def option(*steps):
    made = [Free(name[1:]) if name[0] == "-" else Compute(name) for name in steps]
    return measure_option(GRAPH, Schedule(tuple(made)))


STORED = option("f", "g", "loss", "-y", "back", "-a", "-dy")
AGAIN = option("f", "g", "-a", "loss", "-y", "f", "back", "-a", "-dy")


def chooser(budget, options):
    settings = Settings.read(budget, "auto", "estimate", None, None, None)
    front = RegionFront(GRAPH, tuple(options), (), 0, 0, 0)
    return StepPlanner(
        settings, AutoBudget(None, tuple), lambda plan: None, {}, Kinds([RegionKind("r", front)])
    )


def recorded(**released_outputs):
    moments = [
        TimeStep(HELD, (), (0, "forward")),
        TimeStep(HELD, ((0, 1),), None),
        TimeStep(HELD, (), (0, "backward")),
    ]
    return Recorded((0,), tuple(moments), 0, 0, (released_outputs,), provisional=False)


def test_a_call_holds_what_its_backward_reads_and_what_it_reads_if_it_goes_lean():
    kind = RegionKind("r", RegionFront(GRAPH, (AGAIN, STORED), (), 0, 0, 0))
    assert kind.lean is AGAIN
    assert kind.held_inputs(STORED, droppable=False) == set()
    assert kind.held_inputs(AGAIN) == kind.held_inputs(STORED) == {"x", "w"}


@pytest.mark.parametrize("options", [(STORED,), (AGAIN,), (AGAIN, STORED)])
@pytest.mark.parametrize("released_outputs", [{}, {"x": X}])
def test_inputs_that_were_let_go_of_are_counted_where_they_are_held(options, released_outputs):
    planner = chooser("10kB", options)
    made = planner.plan(recorded(**released_outputs), Origin.here(None)).plan
    anew = X if released_outputs and AGAIN in options else 0
    assert [moment.fixed_bytes - HELD for moment in made.moments] == [0, anew, anew]
    taken = made.options[0]
    assert made.predicted_peak_bytes == HELD + max(
        taken.forward_bytes, anew + taken.kept_bytes, anew + taken.backward_bytes
    )


def test_no_option_is_taken_whose_inputs_do_not_fit():
    backward = max(AGAIN.forward_bytes, AGAIN.backward_bytes)
    room = int(1.003 * (HELD + backward)) + 1
    assert chooser(room, [AGAIN]).plan(recorded(), Origin.here(None)).fits
    with pytest.raises(BudgetTooSmall):
        chooser(room, [AGAIN]).plan(recorded(x=X), Origin.here(None))


LATE = option("f", "g", "loss", "back", "-a", "-y", "-dy")


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "held"])
@pytest.mark.parametrize("reads", [False, True], ids=["not read", "read"])
def test_outputs_that_no_backward_reads_count_as_long_as_they_are_held(gone, reads):
    let_go = 0 if reads else Y
    call = RecordedCall(0, Y, STORED, AGAIN, {}, {}, 0, None, let_go, let_go if gone else 0)
    kept, there = HELD + STORED.kept_bytes, Y if reads or not gone else 0
    before = kept - Y + there + Y  # and its gradient
    within = before + STORED.backward_bytes - STORED.kept_bytes - Y
    marks = [
        Mark("start", HELD, HELD), Mark("forward 0", HELD, HELD), Mark("kept 0", kept, kept),
        Mark("backward 0", before, before), Mark("given 0", HELD, within), Mark("end", HELD, HELD),
    ]  # fmt: skip
    record = Recorded.of([call], marks, provisional=False)
    by_half = {moment.running: moment.fixed_bytes for moment in record.moments}
    assert by_half[0, "forward"] == HELD
    held_by_others = 0 if reads or gone else Y  # which a backward that reads it would hold anyway
    assert by_half[0, "backward"] == HELD + held_by_others
    certain = {moment.running: moment.fixed_bytes for moment in record.certain}
    assert certain[0, "backward"] == HELD


def test_outputs_are_let_go_of_that_a_backward_does_not_read():
    reads = Op("back", ("a", "y", "dy"), ("dw",), 1.0, stage=Stage.BACKWARD)
    graph = Graph(
        GRAPH.values, [*GRAPH.ops[:3], reads], resident={"x", "w"}, results={"dw"}, boundary="loss"
    )
    late = measure_option(graph, LATE.schedule)
    kind = RegionKind("r", RegionFront(graph, (late,), (), 0, 0, 0))
    assert kind.let_go(late) == set()
    kind = RegionKind("r", RegionFront(GRAPH, (AGAIN, STORED), (), 0, 0, 0))
    assert kind.let_go(STORED) == kind.let_go(AGAIN, droppable=False) == {"y"}
    of_user = Graph(GRAPH.values, GRAPH.ops, {"x", "w"}, {"dw", "y"}, "loss")
    kind = RegionKind("r", RegionFront(of_user, (LATE,), (), 0, 0, 0))
    assert kind.let_go(LATE) == set()  # counted to the end
