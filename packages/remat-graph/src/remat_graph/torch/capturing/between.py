"""What happens between the halves of a step: a loss runs, and the user lets go of outputs."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from remat_graph.graph import Graph
from remat_graph.torch.program import KEPT_BY_LOSS, LOSS, LossCost, Program

__all__ = ["released_values", "with_loss", "with_released"]


def with_loss(graph: Graph, loss: LossCost) -> Graph:
    """Give the graph with a loss outside the module that takes this much."""
    ops = tuple(
        replace(op, workspace_bytes=loss.workspace_bytes) if op.name == LOSS else op
        for op in graph.ops
    )
    values = tuple(
        replace(value, size_bytes=loss.kept_bytes) if value.name == KEPT_BY_LOSS else value
        for value in graph.values
    )
    return replace(graph, values=values, ops=ops)


def with_released(graph: Graph, values: Set[str]) -> Graph:
    """Give the graph in which these values are there until the loss has run, and no longer.

    But for those that the backward reads. None is overwritten: the user may hold it nevertheless.
    """
    ops = []
    for op in graph.ops:
        if op.name == LOSS:
            inputs = tuple(dict.fromkeys((*op.inputs, *sorted(values))))
            ops.append(replace(op, inputs=inputs))
        else:
            pairs = tuple((read, new) for read, new in op.overwrites if read not in values)
            ops.append(op if len(pairs) == len(op.overwrites) else replace(op, overwrites=pairs))
    return replace(graph, ops=tuple(ops), results=graph.results - values)


def released_values(program: Program, graph: Graph, positions: frozenset[int]) -> frozenset[str]:
    """Name the values that are held for the user alone, who lets go of these outputs.

    They are positions of what the forward returns.
    """
    storage = program.storage
    positions = positions - program.deferred
    kept = {
        storage[v] for p, v in enumerate(program.handed) if p not in positions | program.deferred
    }
    kept.update(storage[gradient] for gradient in program.gradients.values())
    gone = {storage[program.handed[p]] for p in positions}
    return frozenset((gone & graph.value_by_name.keys()) - kept - graph.resident)
