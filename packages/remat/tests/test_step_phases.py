"""Where a step may stand after what happens in it."""

import pytest

from remat.budgets.auto import AutoBudget
from remat.planning.settings import Settings
from remat.session.phases import Phase
from remat.session.step import StepState
from remat.session.step_planner import StepPlanner

EVENTS = ("begin", "forward", "return", "backward")


def step_after(*events):
    settings = Settings.read(2**20, "auto", "estimate", None, None, None)
    planner = StepPlanner(settings, AutoBudget(None, tuple), lambda plan: None, {}, [])
    step = StepState(settings, lambda plan: None, planner)
    for event in events:
        step.move(event)
    return step


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ("", Phase.OPEN),
        ("forward", Phase.FORWARD),
        ("forward return", Phase.RETURNED),
        ("forward return forward", Phase.FORWARD),  # two forwards before a backward
        ("forward return backward", Phase.BACKWARD),
        ("forward return backward forward", Phase.AGAIN),
        ("forward return backward forward return", Phase.BACKWARD),
        ("forward backward", Phase.AGAIN),  # a forward that differentiates within itself
        ("backward", Phase.BACKWARD),  # of regions that `torch.compile` runs
        ("forward return begin", Phase.OPEN),  # whose outputs were dropped
        ("forward return backward begin", Phase.OPEN),
    ],
)
def test_a_step_goes_through_its_phases(events, phase):
    step = step_after(*events.split())
    assert step.phase is phase
    assert step.within_forward == (phase in (Phase.FORWARD, Phase.AGAIN))
    assert step.backward_over == (phase is Phase.BACKWARD)


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        ("", {"return"}),
        ("forward", {"begin", "forward"}),
        ("forward return", {"return"}),
        ("backward", {"return"}),
        ("backward forward", {"begin", "forward"}),
    ],
)
def test_any_other_move_is_an_error(events, wrong):
    for event in EVENTS:
        step = step_after(*events.split())
        if event in wrong:
            with pytest.raises(KeyError):
                step.move(event)
        else:
            step.move(event)
