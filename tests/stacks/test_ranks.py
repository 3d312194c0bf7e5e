"""Loops of two processes: gradients and weights are those of the plain model, bit by bit.

DDP around a rematerialized model; FSDP2 that shards units that hold rematerialized blocks; ranks
that communicate within a forward, where nothing is sent twice, whatever each recomputes; ranks that
would plan differently, or have batches of other lengths; and the examples that torchrun starts,
FSDP2 by blocks among them. In slices losses and gradients are those within rounding, and each step
is measured to be within a budget that nothing but slices reaches.
"""

import pytest
from integration_cases.unequal import are_eagers
from stack_cases import processes, sliced
from stack_cases.ranks import any_case, example, one_plan

from loop_cases.ranks import collectives, ddp, fsdp_units, run_ranks

CASES = {
    "DDP, gradients are views of buckets": (ddp, {"gradient_as_bucket_view": True}),
    "DDP, static graph": (ddp, {"static_graph": True}),
    "DDP, small buckets": (ddp, {"bucket_cap_mb": 0.001}),
    "DDP, no_sync": (ddp, {"accumulate": True}),
    "DDP, a head at a time, unused parameters looked for": (
        ddp,
        {"heads": True, "find_unused_parameters": True},
    ),
    "DDP, no_sync, a head at a time, unused parameters looked for": (
        ddp,
        {"accumulate": True, "heads": True, "find_unused_parameters": True},
    ),
    "FSDP2 within units": (fsdp_units, {}),
    "collectives": (collectives, {}),
    "one plan of a model": (one_plan, {}),
    "one plan of the regions of a step": (one_plan, {"regions": "layers.*"}),
    "examples/ddp.py": (example, {"name": "ddp"}),
    "examples/fsdp2.py": (example, {"name": "fsdp2"}),
}


IN_SLICES = {"DDP in slices": "DDP", "FSDP2 in slices": "FSDP2"}
LENGTHS = "batches of other lengths"
ALL = {
    **{name: (processes.beside_plain, case) for name, case in CASES.items()},
    **{name: (sliced.beside_plain, kind) for name, kind in IN_SLICES.items()},
    LENGTHS: (are_eagers, 4),
}

pytestmark = pytest.mark.sweep  # two processes take seconds to start


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What two processes found, all cases that are asked for in one start: that takes seconds."""
    here = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["case"] for item in here}
    cases = {name: case for name, case in ALL.items() if name in asked}
    return run_ranks(tmp_path_factory.mktemp("ranks"), any_case, cases)


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_weights_are_those_of_plain_training(found, case):
    processes.assert_same_records(found[case])


@pytest.mark.parametrize("case", IN_SLICES)
def test_ranks_train_in_slices(found, case):
    for of_rank in found[case]:
        assert not isinstance(of_rank, str), of_rank
        steps, is_sliced = of_rank
        assert any(is_sliced)
        for got, expected, peak_bytes, (gathered, gathered_by_plain) in steps:
            sliced.assert_close(got, expected)
            assert peak_bytes <= sliced.BUDGET
            assert gathered == gathered_by_plain  # a head in slices is not gathered for each
            assert (gathered > 0) == (IN_SLICES[case] == "FSDP2")


@pytest.mark.parametrize("case", [LENGTHS])
def test_ranks_have_batches_of_other_lengths(found, case):
    assert found[case] == [True, True]
