"""`drop-cheapest`: free forward values early, the cheapest per byte first, and compute them again.

Values made in the forward half and read in the backward half are ranked by the time of their op per
byte. The first j of them are freed after their last forward reader; before a backward op that reads
one it is computed again, from what is there, and kept until its last reader. j rises from 0 until
the schedule fits.

Guarantee: of the j tried, the least that fits; storing everything if that fits, which is optimal.
Complexity: one schedule and one simulation per j, each about linear; at most 100 are tried.
Limits: a value freed early is dropped for good or not at all, so tight budgets are not met. The
time of computing an op again does not count the ops that must run before it.
Source: none; written as an example of a plugin.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import ClassVar

from remat_graph import Compute, Free, Graph, Schedule, Solution, Status, Step, simulate
from remat_solvers import Limit, Problem, Progress, Report

__all__ = ["DropCheapest"]

_DEFAULT_SECONDS = 30.0
_MOST_TRIED = 100


class DropCheapest:
    """Drop as few values as the budget allows, the cheapest to compute again first."""

    name: ClassVar[str] = "drop-cheapest"
    exact: ClassVar[bool] = False
    needs_hierarchy: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "remat-solver-example 0.1.0, the example plugin of remat-solvers, 2026."
    )

    def can_solve(self, problem: Problem) -> str | None:
        """Refuse graphs without two halves: the rule is about what one keeps for the other."""
        if problem.graph.boundary_index in (0, len(problem.graph.ops)):
            return "the graph has no forward or no backward half"
        return None

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Drop more and more until it fits, at most for the limit (30 s if none is set)."""
        graph = problem.graph
        ranked = _ranked(graph)
        tries = sorted({len(ranked) * i // _MOST_TRIED for i in range(_MOST_TRIED + 1)})
        for number, count in enumerate(tries, 1):
            schedule = _schedule(graph, frozenset(ranked[:count]))
            timeline = simulate(graph, schedule)
            fits = timeline.peak_bytes <= problem.budget_bytes
            report(
                Progress(
                    solver=self.name,
                    round=number,
                    incumbent_time=timeline.time if fits else None,
                    incumbent_peak_bytes=timeline.peak_bytes if fits else None,
                    lower_bound=graph.time,
                    seconds=limit.elapsed,
                    message=f"without {count} values: {timeline.peak_bytes} bytes",
                )
            )
            if fits or limit.left(_DEFAULT_SECONDS) <= 0:
                break
        optimal = fits and timeline.time <= graph.time
        return Solution(
            status=Status.OPTIMAL if optimal else Status.FEASIBLE if fits else Status.LIMIT,
            schedule=schedule if fits else None,
            time=timeline.time if fits else math.inf,
            peak_bytes=timeline.peak_bytes,
            lower_bound=graph.time,  # computing every op once, which no schedule can beat
            solver=self.name,
            solve_seconds=limit.elapsed,
        )


def _ranked(graph: Graph) -> list[str]:
    """Rank what could be dropped: made forward, read backward, free to be computed again."""
    price = {
        v: op.time / graph.value_by_name[v].size_bytes
        for op in graph.ops[: graph.boundary_index]
        for v in op.outputs
        if op.replayable
        and v not in graph.results
        and graph.value_by_name[v].size_bytes > 0
        and max(graph.consumers[v], default=0) >= graph.boundary_index
    }
    return sorted(price, key=lambda v: (price[v], v))


def _schedule(graph: Graph, dropped: Collection[str]) -> Schedule:
    """Compute every op in order, what it misses before it; free what nobody needs after it."""
    kept = graph.results | {v for op in graph.ops if not op.replayable for v in op.outputs}
    alive: set[str] = set()
    steps: list[Step] = []
    for i in range(len(graph.ops)):
        until = graph.boundary_index if i < graph.boundary_index else len(graph.ops)
        for j in (*_missing(graph, i, alive), i):
            steps.append(Compute(graph.ops[j].name))
            alive.update(graph.ops[j].outputs)
        for v in sorted(alive - kept):
            end = until if v in dropped else len(graph.ops)
            if not any(i < reader < end for reader in graph.consumers[v]):
                steps.append(Free(v))
                alive.remove(v)
    return Schedule(tuple(steps))


def _missing(graph: Graph, i: int, alive: Collection[str]) -> list[int]:
    """List the ops that must run again before op `i`, in order."""
    found: set[int] = set()
    pending = [i]
    while pending:
        for v in graph.ops[pending.pop()].inputs:
            if v not in alive and v not in graph.resident and graph.producer[v] not in found:
                found.add(graph.producer[v])
                pending.append(graph.producer[v])
    return sorted(found)
