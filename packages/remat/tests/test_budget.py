"""Every way to write a budget, and every way not to."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat import Budget, BudgetError
from remat.budget import free_bytes, parse_budget

CPU = torch.device("cpu")


def bytes_of(budget, plain=1000):
    return parse_budget(budget).resolve(CPU, lambda: plain)


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

    assert parse_budget(budget).resolve(CPU, plain) == size


@pytest.mark.parametrize(
    ("budget", "size"), [(0.5, 500), (1.0, 1000), ("50%", 500), ("12.5 %", 125), (1e-9, 1)]
)
def test_fractions_are_of_the_plain_peak(budget, size):
    assert bytes_of(budget) == size


def test_auto_takes_what_is_free_less_a_margin_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr("remat.budget.free_bytes", lambda device: 1000)
    with caplog.at_level(logging.INFO, "remat"):
        assert bytes_of("auto") == 900
        assert bytes_of(" AUTO ") == 900
    assert "takes 900 bytes, 90% of what is free on cpu" in caplog.text


def test_what_is_free_is_some_of_what_there_is():
    assert 2**20 < free_bytes(CPU) < 2**50


def test_where_nobody_can_tell_what_is_free_the_error_says_what_to_do(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr("remat.budget.Path.read_text", missing)
    with pytest.raises(BudgetError, match="give the budget in bytes"):
        free_bytes(CPU)


def test_a_budget_is_taken_as_it_is():
    assert parse_budget(Budget(size_bytes=7)) == Budget(size_bytes=7)


@pytest.mark.parametrize(
    "budget",
    [
        0, -1, "0GiB", "-3 MiB", "0.1B", 0.0, -0.5, 1.5, float("nan"), float("inf"), "150%", "0%",
        "-5%", True, False, None, "", "eight", "8", "8.0", "GiB", "8 GiG", "8 Gi B", "8,5 GiB",
        "1e9B", "nan%", "inf GiB", [1], (0.5,), {"bytes": 1}, 1j, b"8GiB", torch.device("cpu"),
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
    if parsed.size_bytes is not None or parsed.fraction is not None:
        assert parsed.resolve(CPU, lambda: 1000) > 0


@given(st.integers(1, 2**60))
def test_whole_numbers_of_bytes_are_exact(size):
    assert bytes_of(size) == size
    assert bytes_of(f"{size} B") == pytest.approx(size, rel=1e-12)
