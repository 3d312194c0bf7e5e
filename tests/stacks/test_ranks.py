"""Loops of two processes: gradients and weights are those of the plain model, bit by bit.

DDP around a rematerialized model; FSDP2 that shards units that hold rematerialized blocks; ranks
that communicate within a forward, where nothing is sent twice, whatever each recomputes; ranks that
would plan differently; and the examples that torchrun starts, FSDP2 by blocks among them.
"""

import runpy
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from stack_cases.processes import assert_same_records, run_cases
from torch import distributed

import remat
from loop_cases.ranks import collectives, ddp, fsdp_units
from remat_solvers import step

EXAMPLES = Path(__file__).parents[2] / "examples"


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

    with mock.patch("remat.steps.choosing.choose", choose):
        kept = ddp(replace(run, wrap=wrap))
    for model in [] if run.plain else made:
        plan, told = model.plan, [None] * distributed.get_world_size()
        assert plan.recomputations
        by_regions = isinstance(plan, remat.StepPlan)
        run_by = [option.schedule for option in plan.options] if by_regions else [plan.schedule]
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


CASES = {
    "DDP, gradients are views of buckets": (ddp, {"gradient_as_bucket_view": True}),
    "DDP, static graph": (ddp, {"static_graph": True}),
    "DDP, small buckets": (ddp, {"bucket_cap_mb": 0.001}),
    "DDP, no_sync": (ddp, {"accumulate": True}),
    "DDP, a head at a time, unused parameters looked for": (
        ddp,
        {"heads": True, "find_unused_parameters": True},
    ),
    "FSDP2 within units": (fsdp_units, {}),
    "collectives": (collectives, {}),
    "one plan of a model": (one_plan, {}),
    "one plan of the regions of a step": (one_plan, {"regions": "layers.*"}),
    "examples/ddp.py": (example, {"name": "ddp"}),
    "examples/fsdp2.py": (example, {"name": "fsdp2"}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two processes found, all cases in one start."""
    return run_cases(tmp_path_factory.mktemp("ranks"), CASES)


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_weights_are_those_of_plain_training(found, case):
    assert_same_records(found[case])
