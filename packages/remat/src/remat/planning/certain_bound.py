"""What no plan of a region can go below, whatever its steps show later.

A plan is made with room that is allowed for a loss, for outputs that are held, and for gradients
that may not come. A refusal tells of what needs none of these: what is proved of the graph less
that room, where it is known which gradients come; else what the forward half needs.
"""

from __future__ import annotations

from dataclasses import replace

from remat_graph import Graph, Status
from remat_graph.torch import GENERATOR_STATE_BYTES, Capture
from remat_solvers import BudgetTooSmall
from remat_solvers.toolkit import PeakBound, Wiring, peak_bound

__all__ = ["forward_bound", "with_certain_bound", "without_state"]


def with_certain_bound(
    error: BudgetTooSmall, *captures: Capture, named_bytes: int, sure: bool, measured_loss: bool
) -> BudgetTooSmall:
    """Tell the same of a budget with a bound that is proved of every plan of these captures.

    `named_bytes` is what it says to be enough, `sure` that the gradients which a capture expects
    come, `measured_loss` that its loss was measured.
    """
    peak = min((forward_bound(each) for each in captures), key=lambda one: one.peak_bytes)
    if sure:
        room = max(_room(each, measured_loss=measured_loss) for each in captures)
        if error.least_bytes - room > peak.peak_bytes:
            peak = PeakBound(error.least_bytes - room, None if room else error.least_at)
    bound = without_state(peak.peak_bytes)
    proved = bound > error.budget_bytes
    return BudgetTooSmall(
        error.budget_bytes,
        named_bytes,
        bound,
        peak.op,
        Status.INFEASIBLE if proved else Status.LIMIT,
        error.results_bytes if sure else 0,
        error.schedule,
    )


def without_state(least_bytes: int) -> int:
    """Give a bound without the state of a generator, which a draw saves only to be made again."""
    return max(0, least_bytes - GENERATOR_STATE_BYTES)


def _room(captured: Capture, *, measured_loss: bool) -> int:
    """Sum what a graph allows: each schedule without it peaks by no more than that lower."""
    sizes, loss = captured.graph.value_by_name, captured.loss
    outputs = captured.released_values(frozenset(range(len(captured.program.returned))))
    allowed = 0 if measured_loss else loss.workspace_bytes + loss.kept_bytes
    return allowed + sum(sizes[value].size_bytes for value in outputs)


def forward_bound(captured: Capture) -> PeakBound:
    """Bound what the ops before the boundary need, which hand out what is returned."""
    graph: Graph = captured.graph
    ops = graph.ops[: graph.boundary_index]
    outputs = {value for op in ops for value in op.outputs}
    returned = graph.results.union(graph.ops[graph.boundary_index].inputs) & outputs
    values = tuple(v for v in graph.values if v.name in outputs or v.name in graph.resident)
    half = replace(graph, values=values, ops=ops, results=returned, boundary=None)
    return peak_bound(Wiring.of(half))
