"""FSDP2 shards a rematerialized model by blocks: exact against plain FSDP2."""

import pytest
from stack_cases.processes import assert_same_records, run_cases

from loop_cases.ranks import fsdp_regions, fsdp_units

CASES = {"regions": fsdp_regions, "within units": fsdp_units}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two processes found, all cases in one start."""
    path = tmp_path_factory.mktemp("fsdp2")
    return run_cases(path, {name: (case, {}) for name, case in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_weights_are_those_of_plain_fsdp2(found, case):
    assert_same_records(found[case])
