"""Bringing a schedule within a budget: where eviction ends, and what is not worth going on with."""

import numpy as np
import pytest
from solver_cases.synthetic import gpt2

from remat_graph import simulate
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.search.evict import evict
from remat_solvers.search.repair import repaired


@pytest.fixture(scope="module")
def wiring():
    return Wiring.of(gpt2(layers=3))


@pytest.fixture(scope="module")
def missed(wiring):
    """List budgets that eviction alone misses by at most a tenth, and the peaks it ends with."""
    order = np.arange(wiring.op_count)
    peak = trace(wiring, order).peak_bytes
    budgets = [int(share * peak) for share in np.arange(0.23, 0.25, 0.004)]
    found = {budget: evict(wiring, order, budget).peak_bytes for budget in budgets}
    return {budget: peak for budget, peak in found.items() if budget < peak <= 1.1 * budget}


def test_what_ends_a_little_over_the_budget_goes_on_in_smaller_steps(wiring, missed):
    assert missed
    fits = []
    for budget, peak in missed.items():
        found = repaired(wiring, trace(wiring, np.arange(wiring.op_count)), budget)
        timeline = simulate(wiring.graph, expand(wiring, found.sequence))
        assert timeline.peak_bytes == found.peak_bytes <= peak
        fits.append(found.peak_bytes <= budget)
    assert any(fits)


def test_nothing_goes_on_beyond_the_time_that_is_worth_while(wiring, missed):
    budget = min(missed)
    everything = trace(wiring, np.arange(wiring.op_count))
    once = wiring.graph.time
    whole = sequence_time(wiring, evict(wiring, everything.sequence, budget).sequence)
    for share in (0.1, 0.5):
        most = once + share * (whole - once)
        found = repaired(wiring, everything, budget, most_time=most)
        assert found.peak_bytes > budget
        assert sequence_time(wiring, found.sequence) < most + 0.1 * once  # that of one eviction
    assert repaired(wiring, everything, budget, most_time=0.0).steps == everything.steps
