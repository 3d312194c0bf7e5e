"""Dead runs: the vectorised way against the walk back, on sequences that recompute at random."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_cases.random_graphs import graphs

from remat_solvers.core.dead_runs import drop_dead_runs, without_dead_runs
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring
from remat_solvers.search.repair import recomputations


@settings(deadline=None)
@given(graphs(), st.randoms(use_true_random=False))
def test_both_ways_leave_the_same(graph, random):
    wiring = Wiring.of(graph)
    sequence = []
    for op in range(wiring.op_count):
        able = [p for p in range(op) if wiring.replayable_list[p]]
        sequence += [*random.sample(able, random.randint(0, min(3, len(able)))), op]
    now = trace(wiring, np.array(sequence, dtype=np.int64))
    again = recomputations(wiring, now).tolist()
    gone = random.sample(again, random.randint(0, len(again)))
    left = drop_dead_runs(wiring, now, gone)
    expected = without_dead_runs(wiring, np.delete(now.sequence, gone))
    assert left.sequence.tolist() == expected.tolist()
    assert drop_dead_runs(wiring, left) is left
