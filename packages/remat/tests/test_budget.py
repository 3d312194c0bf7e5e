"""Every way to write a budget, and every way not to."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat import Budget, BudgetError
from remat.budgets.budget import parse_budget


def bytes_of(budget, plain=1000):
    return parse_budget(budget).resolve(lambda: plain)


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        (1, 1),
        (8 * 2**30, 8 * 2**30),
        (np.int64(4096), 4096),
        ("4096B", 4096),
        ("8GiB", 8 * 2**30),
        (" 8 gib ", 8 * 2**30),
        ("1.5 MiB", 1572864),
        ("500 MB", 500_000_000),
        ("2kB", 2000),
        ("2KiB", 2048),
        (".5 GB", 500_000_000),
        ("1.TB", 10**12),
        ("1TiB", 2**40),
        ("+3B", 3),
    ],
)
def test_bytes(budget, size):
    def plain():
        raise AssertionError("bytes need no plain peak")

    assert parse_budget(budget).resolve(plain) == size


@pytest.mark.parametrize(
    ("budget", "size"), [(0.5, 500), (1.0, 1000), ("50%", 500), ("12.5 %", 125), (1e-9, 1)]
)
def test_fractions_are_of_the_plain_peak(budget, size):
    assert bytes_of(budget) == size


@pytest.mark.parametrize("budget", ["auto", " AUTO "])
def test_auto_is_not_known_before_the_first_step(budget):
    assert parse_budget(budget).is_auto
    with pytest.raises(BudgetError, match="first step"):
        bytes_of(budget)


def test_a_budget_is_taken_as_it_is():
    assert parse_budget(Budget(size_bytes=7)) == Budget(size_bytes=7)


@pytest.mark.parametrize(
    "budget",
    [
        0, -1, "0GiB", "-3 MiB", "0.1B", 0.0, -0.5, 1.5, float("nan"), float("inf"), "150%", "0%",
        "-5%", True, False, None, "", "eight", "8", "8.0", "GiB", "8 GiG", "8 Gi B", "8,5 GiB",
        "1e9B", "nan%", "inf GiB", [1], (0.5,), {"bytes": 1}, 1j, b"8GiB", torch.device("cpu"),
        torch.tensor(0.5), torch.ones(2),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_budget_is_refused_with_examples(budget):
    with pytest.raises(BudgetError, match="budget=") as error:
        parse_budget(budget)
    assert isinstance(error.value, ValueError)
    assert "GiB" in str(error.value) or "a string with a unit" in str(error.value)


@given(st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.booleans(), st.none()))
def test_any_other_input_is_a_budget_or_a_budget_error(budget):
    try:
        parsed = parse_budget(budget)
    except BudgetError:
        return
    if not parsed.is_auto:
        assert parsed.resolve(lambda: 1000) > 0


@given(st.integers(1, 2**60))
def test_whole_numbers_of_bytes_are_exact(size):
    assert bytes_of(size) == size
    assert bytes_of(f"{size} B") == pytest.approx(size, rel=1e-12)
