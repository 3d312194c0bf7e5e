"""Eviction: what it takes to have a value again, and what is held for that."""

import numpy as np
import pytest

from remat_graph import Graph, Op, Value, simulate
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.search.evict import evict
from remat_solvers.search.perturbations import EvictionPerturbation

SIZES = {"x": 0, "seed": 1, "wide": 12, "mask": 10, "big": 15, "mean": 1, "out": 1}


def masked(*, replayable):
    """Make a graph whose `mask`, made of the small `seed`, is idle while `big` is there."""
    ops = (
        Op("widen", ("x",), ("wide",), time=50.0),
        Op("draw", ("wide",), ("seed",), time=1.0, replayable=replayable),
        Op("compare", ("seed",), ("mask",), time=1.0),
        Op("grow", ("x",), ("big",), time=1.0),
        Op("average", ("big",), ("mean",), time=1.0),
        Op("apply", ("mask", "mean"), ("out",), time=1.0),
    )
    return Graph(
        values=tuple(Value(name, size) for name, size in SIZES.items()),
        ops=ops,
        resident=frozenset({"x"}),
        results=frozenset({"out"}),
    )


def evicted(graph, budget, hold):
    """Give the peak, and the time beyond computing everything once."""
    wiring = Wiring.of(graph)
    perturbation = EvictionPerturbation(hold=hold)
    found = evict(wiring, np.arange(wiring.op_count), budget, perturbation=perturbation)
    timeline = simulate(graph, expand(wiring, found.sequence))
    assert timeline.peak_bytes == found.peak_bytes
    return timeline.peak_bytes, timeline.time - graph.time


@pytest.mark.parametrize("hold", [0.0, 0.2])
def test_what_cannot_be_made_again_is_held_for_what_is_made_of_it(hold):
    assert evicted(masked(replayable=False), 18, hold) == (17, 1.0)


def test_what_is_small_is_held_rather_than_made_again():
    assert evicted(masked(replayable=True), 18, 0.0) == (16, 52.0)
    assert evicted(masked(replayable=True), 18, 0.2) == (17, 1.0)


def test_what_frees_nothing_is_not_evicted():
    assert evicted(masked(replayable=False), 5, 0.2)[0] == 17
