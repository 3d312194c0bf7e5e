"""From a point of the stage-refined program to a sequence of computations, just in time.

In each segment a value that is neither kept nor made there is computed again right before the first
op that reads it; what the next checkpoint keeps and nothing in the segment read, right before that
checkpoint. `wiring.expand` frees right after the last use. Linear in the length of the sequence.
"""

from __future__ import annotations

import numpy as np

from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.refine.relaxation import Stagewise

__all__ = ["construct"]


def construct(wiring: Wiring, stagewise: Stagewise) -> Ints:
    """Order the computations; every value read is there, whatever the point says."""
    stops = (*stagewise.checkpoints, wiring.op_count)
    sequence = list(range(stops[0] + 1 if stagewise.checkpoints else wiring.op_count))
    for k, c in enumerate(stagewise.checkpoints):
        there = np.zeros(wiring.value_count, dtype=np.bool_)
        there[sorted(stagewise.kept[k])] = True
        there[wiring.out_start[c] : wiring.out_start[c + 1]] = True
        there[wiring.producer > c] = True
        fixed = ~wiring.replayable[wiring.producer]
        there[fixed] = True
        available: list[bool] = there.tolist()
        stop = stops[k + 1]
        for op in range(c + 1, min(stop, wiring.op_count - 1) + 1):
            if op == stop:
                for v in sorted(stagewise.kept[k + 1]):
                    _bring(wiring, v, available, sequence)
            for v in wiring.inputs[op]:
                _bring(wiring, v, available, sequence)
            sequence.append(op)
        if stop == wiring.op_count:
            for v in wiring.results.tolist():
                _bring(wiring, v, available, sequence)
    return np.array(sequence, dtype=np.int64)


def _bring(wiring: Wiring, value: int, available: list[bool], sequence: list[int]) -> None:
    """Compute a value again, after what it needs in turn, unless it is there."""
    if available[value]:
        return
    pending = [wiring.producer_list[value]]
    while pending:
        op = pending[-1]
        missing = [v for v in wiring.inputs[op] if not available[v]]
        if missing:
            pending.append(wiring.producer_list[missing[0]])
            continue
        pending.pop()
        if not all(available[v] for v in wiring.outputs[op]):
            sequence.append(op)
            for v in wiring.outputs[op]:
                available[v] = True
