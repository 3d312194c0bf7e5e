"""`perturbed`: evictions by perturbed prices, improved locally; a bound by one time step at a time.

What a package of someone else would have: it uses public names alone.
Guarantee: never slower than a given schedule that fits; bounds hold for all schedules in the order
of the graph. Complexity: `tries` evictions and searches, `steps` integer programs of one column for
each op and value. Limits: the bound sees one time step, so tight budgets are left open. Source:
written as an example, 2026.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import sparse

from remat_graph import Solution
from remat_solvers import Limit, Problem, Report
from remat_solvers.toolkit import (
    HIGHS,
    Attempt,
    EvictionPerturbation,
    Outcome,
    Program,
    Wiring,
    evict,
    in_order,
    local_search,
    peak_bound,
    prune,
    solve_program,
    trace,
)


@dataclass(frozen=True)
class Perturbed:
    """`tries` evictions with other prices each, and a bound by each of the fullest time steps."""

    name: ClassVar[str] = "perturbed"
    exact: ClassVar[bool] = False
    needs_hierarchy: ClassVar[bool] = False
    takes_alternatives: ClassVar[bool] = False
    citation: ClassVar[str] = "An example of the tests of remat-solvers, 2026."

    tries: int = 4
    steps: int = 3

    def can_solve(self, problem: Problem) -> str | None:
        """Take any graph that has an op."""
        return None if problem.graph.ops else "the graph has no ops"

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Search first, then prove, for 5 s if no limit is set."""
        attempt = Attempt(self.name, problem, limit, report, seconds=5.0)
        if attempt.settled_at_once(peak_bound(attempt.wiring).peak_bytes):
            return attempt.solution()
        everything = np.arange(attempt.wiring.op_count)
        given = None if problem.start is None else in_order(attempt.wiring, problem.start)
        if given is not None:
            attempt.take(given)
        for seed in range(self.tries):
            for start in (everything, given):
                if start is not None and attempt.left() and not attempt.closed():
                    self._search(attempt, start, seed)
        fullest = np.argsort(-trace(attempt.wiring, everything).during, kind="stable")
        for op in fullest[: self.steps].tolist():
            if attempt.left() and not attempt.infeasible and not attempt.closed():
                self._prove(attempt, op)
        return attempt.solution()

    def _search(self, attempt: Attempt, start: np.ndarray, seed: int) -> None:
        wiring, budget, until = attempt.wiring, attempt.budget_bytes, attempt.deadline
        prices = EvictionPerturbation(noise=0.3 if seed else 0.0, seed=seed)
        found = evict(wiring, start, budget, perturbation=prices, deadline=until)
        found = prune(wiring, found, budget, deadline=until)
        if found.peak_bytes <= budget:
            found = local_search(wiring, found, budget, seed=seed, deadline=until, patience=20)
        attempt.take(found.sequence)

    def _prove(self, attempt: Attempt, op: int) -> None:
        program = one_step(attempt.wiring, attempt.budget_bytes, op)
        answer = solve_program(program, seconds=attempt.left())
        if answer.outcome is Outcome.INFEASIBLE:
            attempt.refuse(HIGHS)
        else:
            attempt.raise_bound(attempt.once * (1 + answer.bound / 1000), HIGHS)
        attempt.say(f"bounded all schedules where op {op} runs")


def one_step(wiring: Wiring, budget_bytes: int, op: int) -> Program:
    """Choose what is kept while an op first runs, and what runs again after it.

    What is read later is kept or runs again, with what that reads; what is kept fits beside the op.
    """
    before = np.flatnonzero(wiring.producer < op)
    kept = np.full(wiring.value_count, -1)
    kept[before] = np.arange(len(before))
    again = len(before) + wiring.producer  # of the op that makes a value
    reader = np.repeat(np.arange(wiring.op_count), np.diff(wiring.in_start))
    value, inside = wiring.in_value, kept[wiring.in_value] >= 0
    due = np.unique(np.concatenate([value[reader > op], wiring.results]))
    due = due[kept[due] >= 0]
    chain = inside & (reader < op)
    read = np.concatenate([due, value[chain]])
    by = len(before) + reader[chain]
    width, count = len(before) + op, len(read)
    rows = np.arange(count)
    size = wiring.size.astype(float)
    size[list(wiring.overwritten[op])] = 0  # their memory may be what the op writes
    unit = budget_bytes / 1000
    room = budget_bytes - wiring.output_bytes[op] - wiring.workspace_list[op]
    entries = np.concatenate([np.full(2 * count, -1.0), np.ones(len(by)), size[before] / unit])
    row = np.concatenate([rows, rows, rows[len(due) :], np.full(len(before), count)])
    column = np.concatenate([kept[read], again[read], by, np.arange(len(before))])
    lower = np.zeros(width)
    lower[kept[value[inside & (reader == op)]]] = 1
    scale = 1000 / max(float(wiring.time.sum()), 1e-300)
    return Program(
        cost=np.concatenate([np.zeros(len(before)), wiring.time[:op] * scale]),
        matrix=sparse.csr_array((entries, (row, column)), shape=(count + 1, width)),
        right=np.concatenate([-np.ones(len(due)), np.zeros(len(by)), [room / unit + 1e-9]]),
        lower=lower,
        upper=np.concatenate([np.ones(len(before)), wiring.replayable[:op].astype(float)]),
        integral=np.ones(width, dtype=np.bool_),
    )
