"""What a recorded step says of one whose calls of regions run by other options."""

import pytest

from remat.budgets.auto import AutoBudget
from remat.planning.settings import Settings
from remat.plans.origin import Origin
from remat.session.kinds import RegionKind
from remat.session.near_kinds import Kinds
from remat.session.recording import Recorded
from remat.session.step_planner import StepPlanner
from remat_graph import Compute, Free, Graph, Op, Schedule, Stage, Value
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
