"""What the backward half of a schedule reads, and what of that is compared before."""

from __future__ import annotations

from remat_graph import Compute, Graph, Schedule, Stage

__all__ = ["compared", "read_by_backward"]


def read_by_backward(graph: Graph, schedule: Schedule) -> set[str]:
    """Find the values that a schedule reads after the op at the boundary."""
    computed = [step.op for step in schedule if isinstance(step, Compute)]
    after = computed[computed.index(graph.ops[graph.boundary_index].name) + 1 :]
    return {value for name in after for value in graph.ops[graph.op_index[name]].inputs}


def compared(graph: Graph, schedule: Schedule) -> set[str]:
    """Find the inputs and outputs that a backward reads, though eager would not have kept them."""
    kept = {
        value for op in graph.ops if op.stage is Stage.BACKWARD and op.owed for value in op.inputs
    }
    by_forward = {value for op in graph.ops[: graph.boundary_index] for value in op.outputs}
    return read_by_backward(graph, schedule) & (graph.resident | graph.results & by_forward) - kept
