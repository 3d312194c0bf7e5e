"""DDP around a rematerialized model: gradients are those of DDP around the plain one."""

import pytest
from stack_cases.processes import assert_same_records, run_cases

from loop_cases.ranks import ddp

CASES = {
    "gradients are views of buckets": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 0.001},
    "no_sync": {"accumulate": True},
    "a head at a time, unused parameters looked for": {
        "heads": True,
        "find_unused_parameters": True,
    },
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two processes found, all cases in one start."""
    path = tmp_path_factory.mktemp("ddp")
    return run_cases(path, {name: (ddp, options) for name, options in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_weights_are_those_of_plain_ddp(found, case):
    assert_same_records(found[case])
