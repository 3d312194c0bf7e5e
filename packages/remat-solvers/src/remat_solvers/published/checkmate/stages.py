r"""Checkmate's stages over a graph, and the least recomputation for a choice of what to keep.

Stage t is where op t is computed for the first time (the frontier advances, equations 8a to 8c);
before it, ops 1 to t-1 may be computed again, in the order of the graph and once each. A last stage
has a virtual op that reads all results. A schedule is a pair of matrices: `kept[t, v]` (S in the
paper), value v is alive when stage t begins, and `run[t, i]` (R), op i is computed in stage t.

What no later stage can need, directly or to compute something again, is never kept or computed
again: value v matters to stages up to

    L(v) = max over the ops k that read v of k and, if k may be run again, of L(its outputs).

`least_run` is phase two of the paper's rounding (algorithm 2), by which its baselines are scheduled
too: the least R for a given S under (1b) and (1c). Exact; O(ops x edges) in vectors over stages.
Source: Checkmate (Jain et al. 2020), sections 4.2 to 4.6 and 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat_solvers.core.trace import Trace, first_runs, trace
from remat_solvers.core.wiring import Ints, Wiring

__all__ = ["Bits", "Stages"]

Bits = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """A wiring in stages.

    `count` stages, one per op and one for the virtual op; read `e` is of `read_value[e]` by op
    `read_op[e]`, sorted by value, then op. `last_keep[v]` is L(v) above, `last_run[i]` the last
    stage in which running op i can be of use.
    """

    wiring: Wiring
    read_value: Ints
    read_op: Ints
    last_read: Ints
    last_keep: Ints
    last_run: Ints

    @classmethod
    def of(cls, wiring: Wiring) -> Stages:
        """Lay out the stages."""
        ops = wiring.op_count
        value = np.concatenate([wiring.in_value, wiring.results])
        reader = np.concatenate(
            [
                wiring.in_op,
                np.full(len(wiring.results), ops),
            ]
        )
        order = np.lexsort((reader, value))
        last_read = wiring.producer.copy()
        np.maximum.at(last_read, value, reader)
        last_keep = last_read.tolist()
        last_run = list(range(ops))
        for op in reversed(range(ops)):
            if wiring.replayable_list[op]:
                last_run[op] = max([op, *(last_keep[v] for v in wiring.outputs[op])])
            for v in wiring.inputs[op]:
                last_keep[v] = max(last_keep[v], last_run[op])
        return cls(
            wiring=wiring,
            read_value=value[order],
            read_op=reader[order],
            last_read=last_read,
            last_keep=np.array(last_keep, dtype=np.int64),
            last_run=np.array(last_run, dtype=np.int64),
        )

    @property
    def count(self) -> int:
        """Number of stages."""
        return self.wiring.op_count + 1

    def may_keep(self) -> Bits:
        """Say for each stage and value whether it can be of use to keep it there."""
        stage = np.arange(self.count)[:, None]
        kept: Bits = (stage > self.wiring.producer) & (stage <= self.last_keep)
        return kept

    def may_run(self) -> Bits:
        """Say for each stage and op whether it must (the diagonal) or can usefully be run there."""
        stage, op = np.arange(self.count)[:, None], np.arange(self.count)
        last = np.append(self.last_run, self.wiring.op_count)
        run: Bits = (stage == op) | ((stage > op) & (stage <= last))
        return run

    def least_run(self, kept: Bits) -> Bits:
        """Find the least R for S; what cannot be computed again is kept as long as it is needed."""
        wiring = self.wiring
        kept = np.vstack([kept & self.may_keep(), np.zeros((1, wiring.value_count), np.bool_)])
        run = np.eye(self.count, dtype=np.bool_)
        start = np.searchsorted(self.read_value, np.arange(wiring.value_count + 1))
        for op in reversed(range(wiring.op_count)):
            for v in wiring.outputs[op]:
                readers = np.unique(self.read_op[start[v] : start[v + 1]])
                wanted = kept[1:, v] | run[:, readers].any(axis=1)
                if wiring.replayable_list[op]:
                    run[op + 1 :, op] |= wanted[op + 1 :] & ~kept[op + 1 : -1, v]
                elif wanted.any():
                    kept[op + 1 : int(np.flatnonzero(wanted)[-1]) + 1, v] = True
        return run

    def sequence(self, run: Bits) -> Ints:
        """List the computations of R in order; `wiring.expand` frees after the last use."""
        ops = np.nonzero(run)[1]
        return ops[ops < self.wiring.op_count]

    def schedule(self, kept: Bits) -> Trace:
        """Follow the least recomputation for S."""
        return trace(self.wiring, self.sequence(self.least_run(kept)))

    def read_off(self, now: Trace) -> Bits:
        """Say what a trace keeps at the start of each stage."""
        first = first_runs(self.wiring, now)
        kept = np.zeros((self.count, self.wiring.value_count), dtype=np.bool_)
        for stage in range(1, self.count):
            before = int(first[stage - 1])
            alive = (now.copy_start <= before) & (now.copy_last > before)
            kept[stage, now.copy_value[alive]] = True
        return kept
