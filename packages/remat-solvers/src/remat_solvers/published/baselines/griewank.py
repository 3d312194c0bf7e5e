r"""`griewank`: revolve, the binomial checkpointing of a chain, with the number of slots swept.

To reverse l steps from a state with c snapshots (that state among them), revolve advances m steps,
takes a snapshot, reverses the l - m steps behind it with c - 1, and then the m before it with c.
With beta(c, r) = (c + r choose c) and r such that beta(c, r - 1) < l <= beta(c, r), any m with
beta(c, r - 2) <= m <= beta(c, r - 1) and beta(c - 1, r - 1) <= l - m <= beta(c - 1, r) is optimal,
and there are r l - beta(c + 1, r - 1) advances in all.

A step is a forward op, a snapshot what it makes; the input of the chain is resident and the first
snapshot. When the turn comes to a step, what it reads and makes is there, computed from the
snapshot before it; the last step's is still there from the forward half.
Guarantee: the fewest advances for each number of slots on a chain of unit ops; of all numbers
tried, the fastest within the budget. Complexity: at most 64 numbers, each O(ops x values).
Limits: chains only; knows neither sizes nor times.
Source: Griewank and Walther 2000, section 2; a baseline in Jain et al. 2020, section 3 and table 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb
from typing import ClassVar

import numpy as np

from remat_graph import Solution
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Report
from remat_solvers.published.baselines.forward import turns, why_no_chain, why_unsuitable
from remat_solvers.published.baselines.sweep import cheapest
from remat_solvers.published.checkmate.stages import Bits, Stages

__all__ = ["Griewank", "keep_snapshots", "snapshots_taken"]

_NUMBERS = 64


def snapshots_taken(steps: int, slots: int) -> list[tuple[int, int]]:
    """List revolve's snapshots: (the step whose state is kept, the step in whose turn it is taken).

    `slots` do not count the input. A snapshot is given up once the turn is past its step.
    """
    snapshots_at: list[tuple[int, int]] = []
    pending = [(0, steps, slots)]
    while pending:
        since, until, free = pending.pop()
        if until - since > 1 and free > 0:
            middle = since + _advance(until - since, free + 1)
            snapshots_at.append((middle - 1, until - 1))
            pending += [(since, middle, free), (middle, until, free - 1)]
    return snapshots_at


def _advance(steps: int, snapshots: int) -> int:
    """Choose m, the number of steps to the next snapshot."""
    rounds = 1
    while comb(snapshots + rounds, snapshots) < steps:
        rounds += 1
    least = comb(snapshots + rounds - 2, snapshots) if rounds > 1 else 1
    return max(least, steps - comb(snapshots - 1 + rounds, snapshots - 1))


def keep_snapshots(stages: Stages, slots: int) -> Bits:
    """Say what is kept at each stage with so many slots."""
    wiring = stages.wiring
    steps = wiring.graph.boundary_index
    producer = wiring.producer
    turn = np.array(turns(stages))
    numbers = np.arange(steps + 1)
    # `turn` never rises: the first stage whose turn is at or before a step, the last at or after.
    opens = steps + np.searchsorted(-turn, -numbers, side="left")
    closes = steps + np.searchsorted(-turn, -numbers, side="right") - 1

    stage = np.arange(stages.count)[:, None]
    inside = stages.read_op < steps
    last_forward = producer.copy()
    np.maximum.at(last_forward, stages.read_value[inside], stages.read_op[inside])
    first_backward = np.full(wiring.value_count, stages.count)
    np.minimum.at(first_backward, stages.read_value[~inside], stages.read_op[~inside])

    step = np.minimum(producer, steps - 1)
    since = np.maximum(opens[step + 1], first_backward)
    since[producer >= steps - 2] = 0
    kept: Bits = (stage > since) & (stage <= np.minimum(closes[step], stages.last_read))
    for held, at in snapshots_taken(steps, slots):
        since_stage = held if at == steps - 1 else int(opens[at])
        kept[:, producer == held] |= (stage > since_stage) & (stage <= closes[held])
    always = producer >= steps
    always[wiring.results] = True
    kept |= always | (stage <= last_forward)
    kept &= stages.may_keep()
    return kept


class Griewank(PlainSolver):
    """Revolve over a chain, with as many slots as fit."""

    name: ClassVar[str] = "griewank"
    citation: ClassVar[str] = (
        "A. Griewank, A. Walther: Algorithm 799: Revolve: An Implementation of Checkpointing for "
        "the Reverse or Adjoint Mode of Computational Differentiation. ACM TOMS 26(1), 2000."
    )

    def can_solve(self, problem: Problem) -> str | None:
        """Refuse graphs whose forward ops are no chain."""
        return why_unsuitable(problem.graph) or why_no_chain(problem.graph)

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Sweep the number of slots; keep the fastest schedule that fits."""
        stages = Stages.of(problem.wiring)
        return cheapest(self.name, stages, problem.budget_bytes, limit, report, _proposals(stages))


def _proposals(stages: Stages) -> Iterator[tuple[str, Bits]]:
    steps = stages.wiring.graph.boundary_index
    numbers = np.unique(np.geomspace(1, max(steps, 1), _NUMBERS).astype(int)) - 1
    for slots in reversed(numbers.tolist()):
        yield f"{slots} slots", keep_snapshots(stages, slots)
