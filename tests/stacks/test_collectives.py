"""Ranks that communicate within a forward: nothing is sent twice, whatever each recomputes."""

import pytest
from stack_cases.processes import assert_same_records, run_cases

from loop_cases.ranks import collectives


@pytest.mark.parametrize("case", [collectives])
def test_gradients_and_weights_are_those_of_plain_training(case, tmp_path):
    assert_same_records(run_cases(tmp_path, {"case": (case, {})})["case"])
