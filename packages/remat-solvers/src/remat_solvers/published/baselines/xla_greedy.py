"""`xla-greedy`: the rematerialization pass of XLA, one op at a time.

As Kumar et al. describe it ("Efficient Rematerialization for Deep Networks", NeurIPS 2019, section
4, "GreedyRemat"): walk through the ops in execution order; while the memory is over the limit,
choose of the ops computed so far the one whose idle values free most memory now, less the inputs
that must live longer for it, and compute it again before its next use; when nothing lowers the
memory, move on. As in XLA a recomputation is not itself recomputed, so a schedule has at most twice
the ops.

Guarantee: none; a heuristic, and a weak one: an op whose inputs are gone gains nothing, so chains
stay stored but for every other value or so.
Complexity: one trace and a scan of the idle values per recomputation, so about quadratic.
Limits: what is not replayable stays. First computations stay in the order of the graph.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from typing import ClassVar

import numpy as np

from remat_graph import Solution
from remat_solvers.core.incumbent import Incumbent
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Report
from remat_solvers.core.trace import Trace, trace
from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.search.evict import idle_copies

__all__ = ["XLAGreedy", "greedy_sequence"]

_DEFAULT_SECONDS = 30.0


class XLAGreedy(PlainSolver):
    """XLA's greedy heuristic; `LIMIT` where it does not reach the budget."""

    name: ClassVar[str] = "xla-greedy"
    citation: ClassVar[str] = (
        "Ravi Kumar, Manish Purohit, Zoya Svitkina, Erik Vee, Joshua R. Wang. "
        "Efficient Rematerialization for Deep Networks. NeurIPS 2019. Section 4, GreedyRemat; "
        "the heuristic is that of XLA's HloRematerialization (openxla.org)."
    )

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Walk once through the graph, in at most 30 s if no limit is set."""
        wiring = problem.wiring
        deadline = time.perf_counter() + limit.left(_DEFAULT_SECONDS)
        greedy = trace(wiring, greedy_sequence(wiring, problem.budget_bytes, deadline))
        incumbent = Incumbent(self.name, wiring, problem.budget_bytes, limit, report, bounded=False)
        incumbent.offer(greedy)
        incumbent.say(f"peak {greedy.peak_bytes} bytes")
        return incumbent.solution()


def greedy_sequence(wiring: Wiring, budget_bytes: int, deadline: float = math.inf) -> Ints:
    """Recompute greedily until the end of the graph, or `deadline` of `perf_counter`."""
    now = trace(wiring, np.arange(wiring.op_count))
    again: set[int] = set()
    position = 0
    while position < now.steps:
        choice = None
        if now.during[position] > budget_bytes and time.perf_counter() < deadline:
            choice = _largest_reduction(wiring, now, position, again)
        if choice is None:
            position += 1
            continue
        op, before = choice
        again.add(op)
        now = trace(wiring, np.insert(now.sequence, before, op))
    return now.sequence


def _largest_reduction(
    wiring: Wiring, now: Trace, position: int, again: set[int]
) -> tuple[int, int] | None:
    """Choose the op to compute again and where, if that lowers the memory at a position."""
    copies, _, next_use = idle_copies(wiring, now, position)
    freed: dict[int, int] = {}
    where: dict[int, int] = {}
    for copy, use in zip(copies.tolist(), next_use.tolist(), strict=True):
        v = int(now.copy_value[copy])
        op = wiring.producer_list[v]
        freed[op] = freed.get(op, 0) + int(wiring.size[v])
        where[op] = min(where.get(op, use), use)
    best, chosen = 0, None
    key: list[int] = now.key.tolist()
    for op, gain in freed.items():
        if op in again or gain <= best or where[op] >= now.steps:
            continue
        reduction = gain - _prolonged_bytes(wiring, now, key, op, position, where[op])
        if reduction > best:
            best, chosen = reduction, (op, where[op])
    return chosen


def _prolonged_bytes(
    wiring: Wiring, now: Trace, key: list[int], op: int, position: int, use: int
) -> int:
    """Count the inputs that are gone at a position and would have to live on until a use."""
    more = 0
    for v in wiring.inputs[op]:
        rank = bisect_left(key, wiring.producer_list[v] * (now.steps + 1) + use) - 1
        copy = int(now.first_copy[rank]) + wiring.slot_list[v]
        if now.copy_start[copy] <= position and now.copy_last[copy] < position:
            more += int(wiring.size[v])
    return more
