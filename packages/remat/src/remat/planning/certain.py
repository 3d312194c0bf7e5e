"""What no plan of a region can go below, whatever its steps show later.

A plan is made with room that is allowed for a loss, for outputs that are held, and for gradients
that may not come. A refusal tells of what needs none of these: the forward half, and where it is
known which gradients come, each op of the backward half and the gradients at the end.
"""

from __future__ import annotations

from dataclasses import replace

from remat_graph import Graph, Status
from remat_graph.torch import Capture
from remat_solvers import BudgetTooSmall
from remat_solvers.bounds.least import Least, least, while_running
from remat_solvers.core.wiring import Wiring

__all__ = ["least_of", "with_certain_bound"]


def with_certain_bound(error: BudgetTooSmall, *captures: Capture, sure: bool) -> BudgetTooSmall:
    """Tell the same of a budget with a bound that is proved of every plan of these captures.

    `sure` says that the gradients which a capture expects come.
    """
    found = min((least_of(each, sure=sure) for each in captures), key=lambda one: one.peak_bytes)
    bound = min(found.peak_bytes, error.smallest_bytes)
    budget = error.budget_bytes
    return BudgetTooSmall(
        budget,
        error.smallest_bytes,
        bound,
        found.op,
        Status.INFEASIBLE if bound > budget else Status.LIMIT,
        error.results_bytes if sure else 0,
        error.schedule,
    )


def least_of(captured: Capture, *, sure: bool) -> Least:
    """Bound the peak of every schedule, with no room for a loss, whatever the user holds."""
    graph = captured.letting_go(frozenset(range(len(captured.program.returned)))).graph
    found = [least(Wiring.of(_forward_half(graph)))]
    if sure:
        gradients = graph.results - graph.resident
        found.append(Least(sum(graph.value_by_name[v].size_bytes for v in gradients), None))
        if not graph.has_alternatives:
            wiring, after = Wiring.of(graph), graph.boundary_index + 1
            needs = while_running(wiring)[after:]
            if len(needs):
                at = int(needs.argmax())
                found.append(Least(int(needs[at]), graph.ops[after + at].name))
    return max(found, key=lambda one: one.peak_bytes)


def _forward_half(graph: Graph) -> Graph:
    """Give the ops before the boundary, which hand out at the end what is returned."""
    ops = graph.ops[: graph.boundary_index]
    made = {value for op in ops for value in op.outputs}
    returned = graph.results.union(graph.ops[graph.boundary_index].inputs) & made
    values = tuple(v for v in graph.values if v.name in made or v.name in graph.resident)
    return replace(graph, values=values, ops=ops, results=returned, boundary=None)
