"""Loops of two processes: gradients and weights are those of the plain model, bit by bit.

DDP around a rematerialized model; FSDP2 that shards units that hold rematerialized blocks (by
blocks, each one region, is `examples/fsdp2.py`); ranks that communicate within a forward, where
nothing is sent twice, whatever each recomputes.
"""

import pytest
from stack_cases.processes import assert_same_records, run_cases

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
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two processes found, all cases in one start."""
    return run_cases(tmp_path_factory.mktemp("ranks"), CASES)


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_weights_are_those_of_plain_training(found, case):
    assert_same_records(found[case])
