"""Change which ops of a group run first in a sequence: one group, or all that are alike."""

from __future__ import annotations

import numpy as np

from remat_solvers.core.alternatives import Alternatives
from remat_solvers.core.dead_runs import without_dead_runs
from remat_solvers.core.trace import Trace, trace
from remat_solvers.core.wiring import Wiring
from remat_solvers.search.selection import with_way

__all__ = ["swap_alternatives"]

_ALIKE = 0.5  # of the changes, of all ops of an equivalence class


def swap_alternatives(
    wiring: Wiring, alternatives: Alternatives, now: Trace, rng: np.random.Generator
) -> Trace:
    """Let an op, or some or all that are equal to it, run first in place of those that do.

    Where what they read has not been made by then, all stays as it is.
    """
    able = np.flatnonzero(alternatives.chosen & alternatives.opens)
    if not len(able):
        return now
    ops = wiring.graph.ops
    op = int(rng.choice(able))
    alike = [op]
    if ops[op].equivalence is not None and rng.random() < _ALIKE:
        alike = [p for p in able.tolist() if ops[p].equivalence == ops[op].equivalence]
    ways = {
        int(alternatives.group[p]): with_way(wiring, alternatives, frozenset(), p) for p in alike
    }
    sequence: list[int] = []
    available: set[int] = set()
    available_before: set[int] = set()  # in the sequence as it was
    changed: set[int] = set()
    for p in now.sequence.tolist():
        c = int(alternatives.group[p])
        first = (
            ways.get(c, frozenset()) if not available_before.issuperset(wiring.outputs[p]) else ()
        )
        available_before.update(wiring.outputs[p])
        if c in changed and first:
            continue
        here = [p]
        if first and all(available.issuperset(wiring.inputs[q]) for q in first):
            here = sorted(first)
            changed.add(c)
        sequence += here
        available.update(v for q in here for v in wiring.outputs[q])
    return trace(wiring, without_dead_runs(wiring, np.array(sequence, dtype=np.int64)))
