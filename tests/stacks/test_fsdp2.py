"""FSDP2 shards units that hold rematerialized blocks: exact against plain FSDP2.

By blocks, each one region, is `examples/fsdp2.py`.
"""

from stack_cases.processes import assert_same_records, run_cases

from loop_cases.ranks import fsdp_units


def test_gradients_and_weights_are_those_of_plain_fsdp2(tmp_path):
    found = run_cases(tmp_path, {"within units": (fsdp_units, {})})
    assert_same_records(found["within units"])
