"""Loops of two processes: gradients and weights are those of the plain model, bit by bit.

DDP around a rematerialized model; FSDP2 that shards units that hold rematerialized blocks; ranks
that communicate within a forward, where nothing is sent twice, whatever each recomputes; ranks that
would plan differently; and the examples that torchrun starts, FSDP2 by blocks among them.
"""

import pytest
from stack_cases.processes import assert_same_records, run_cases
from stack_cases.ranks import example, one_plan

from loop_cases.ranks import collectives, ddp, fsdp_units

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
