"""`drop-cheapest`: free forward values early, the cheapest per byte first, and compute them again.

More and more of what the backward half reads is left to be computed again right before it is read,
until the schedule fits; what the budget has room for after all is taken out again (`prune`).
Guarantee: none but what `prune` keeps. Complexity: at most 50 traces. Limits: what is dropped is
dropped for good, so tight budgets are not met. Source: written as an example of a plugin.
"""

from dataclasses import dataclass

import numpy as np

from remat_graph import Solution
from remat_solvers.toolkit import Incumbent, Limit, Problem, Report, Wiring, prune, trace


@dataclass(frozen=True)
class DropCheapest:
    """Drop as few values as the budget allows; `tries` is how many numbers of them are tried."""

    name = "drop-cheapest"
    exact = False
    needs_hierarchy = False
    takes_alternatives = False
    citation = ""  # of no paper

    tries: int = 50

    def can_solve(self, problem: Problem) -> str | None:
        """Take any graph."""
        return None if problem.graph.ops else "the graph has no ops"

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Drop more and more until it fits."""
        wiring = Wiring.of(problem.graph)
        incumbent = Incumbent(self.name, wiring, problem.budget_bytes, limit, report)
        price = wiring.time[wiring.producer] / np.maximum(wiring.size, 1)
        ranked = np.argsort(price, kind="stable")
        ranked = ranked[wiring.replayable[wiring.producer[ranked]]]
        for count in np.linspace(0, len(ranked), self.tries, dtype=int):
            sequence = dropping(wiring, set(ranked[:count].tolist()), problem.graph.boundary_index)
            now = prune(wiring, trace(wiring, sequence), problem.budget_bytes)
            fits = incumbent.offer(now)
            incumbent.say(f"without {count} values: {now.peak_bytes} bytes")
            if fits or limit.left(30.0) == 0:
                break
        return incumbent.solution()


def dropping(wiring: Wiring, dropped: set[int], boundary: int) -> np.ndarray:
    """Compute every op in order; before an op of the backward half, what it misses."""
    sequence: list[int] = []
    alive: set[int] = set()
    for op in range(wiring.op_count):
        if op == boundary:
            alive -= dropped
        missing, needed = [op], {op}
        while missing:
            producers = [
                wiring.producer_list[v] for v in wiring.inputs[missing.pop()] if v not in alive
            ]
            missing += set(producers) - needed
            needed.update(producers)
        for each in sorted(needed):
            sequence.append(each)
            alive.update(wiring.outputs[each])
    return np.array(sequence)
