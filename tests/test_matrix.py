"""A few of the architectures of `benchmarks/matrix.py`, by its own judgement."""

import pytest
from integration_cases.sweeps import swept

import matrix_cases
from matrix_cases import judging

CASES = ("deberta_v2", "fnet", "patchtst")
PLANNING_SECONDS = 0.1  # what counts here is that they train


@pytest.mark.parametrize("name", swept(CASES, ["patchtst"]))
def test_trains_as_eager_does_within_the_budget(name, monkeypatch):
    monkeypatch.setattr(judging, "PLANNING_SECONDS", PLANNING_SECONDS)
    outcome = matrix_cases.run_case(f"transformers/{name}")
    assert outcome.category in ("right", "rounding"), f"{outcome.category}: {outcome.reason}"
    assert outcome.bitwise
    assert outcome.peak_bytes <= outcome.budget_bytes


def test_every_name_is_of_a_case():
    for kind in matrix_cases.KINDS:
        names = matrix_cases.names(kind)
        assert len(set(names)) == len(names)
        assert all(name.startswith(f"{kind}/") for name in names)


def test_most_architectures_have_a_case():
    assert len(matrix_cases.names("transformers")) >= 200
    assert len(matrix_cases.names("modules")) >= 100


def test_an_unknown_name_is_an_error():
    with pytest.raises(KeyError):
        matrix_cases.find("transformers/none-such")
