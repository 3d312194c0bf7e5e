"""Loops of ranks that are of the tests alone."""

import runpy
from dataclasses import replace
from pathlib import Path
from unittest import mock

from torch import distributed

from loop_cases.ranks import ddp
from remat_solvers import step

EXAMPLES = Path(__file__).parents[3] / "examples"


def any_case(rank, case):
    """Run what a case names, with its argument."""
    run, argument = case
    return run(rank, argument)


def one_plan(run, **options):
    """Train where ranks choose differently, and see that all run the plan of one."""
    rank = distributed.get_rank()
    made = []

    def wrap(model, **more):
        solver = ("refine", "xla-greedy")[rank]
        made.append(run.wrap(model, budget=0.8, solver=solver, **options, **more))
        return made[-1]

    def choose(fronts, calls, moments, room, **limit):
        return step.choose(fronts, calls, moments, int((1, 0.9)[rank] * room), **limit)

    with (
        mock.patch("remat.session.choosing.choose", choose),
        mock.patch("remat.session.step_planner.MOST_TIMES", 2.0),
        mock.patch("remat.planning.ranks.MOST_TIMES", 2.0),
    ):
        kept = ddp(replace(run, wrap=wrap))
    for model in [] if run.plain else made:
        plan, told = model.plan, [None] * distributed.get_world_size()
        assert plan.recomputations
        run_by = [option.schedule for option in plan.options]
        distributed.all_gather_object(told, run_by)
        assert told[0] == told[1]
    return kept


def example(run, name):
    """Run an example of `examples/`, which asserts what it says, within the group that is there."""
    if not run.plain:
        with (
            mock.patch.object(distributed, "init_process_group"),
            mock.patch.object(distributed, "destroy_process_group"),
        ):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return {}
