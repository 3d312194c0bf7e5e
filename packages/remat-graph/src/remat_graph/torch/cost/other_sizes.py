"""What operators take for other sizes: in proportion to what they touch.

Workspaces shrink for no size. What is run slice by slice touches all that is inside, and takes more
at once in proportion to its longest slice.
"""

from __future__ import annotations

import math

from remat_graph.graph import Graph
from remat_graph.torch.calls import state_bytes
from remat_graph.torch.cost.costs import Cost, with_runs_again
from remat_graph.torch.program import LossCost, Program
from remat_graph.torch.slices.placement import WHOLE, Sliced
from remat_graph.torch.ways.slicing import run_in_slices

__all__ = ["graph_costed_like", "loss_in_proportion", "op_costs_like"]


def graph_costed_like(graph: Graph, of: Program, program: Program, loss: LossCost) -> Graph:
    """Make the graph of a program, with what its ops take in that of one of other sizes."""
    costs = _costs_like(graph, of, program)
    times = {op: cost.time for op, cost in costs.items()}
    return program.graph(times, {op: cost.workspace_bytes for op, cost in costs.items()}, loss)


def op_costs_like(
    graph: Graph, of: Program, program: Program, loss: LossCost, wanted: Graph
) -> tuple[list[float], list[int]]:
    """Give the seconds and the workspace of each op that such a graph would have.

    `wanted` has these ops, in their order.
    """
    costs, none = _costs_like(graph, of, program), Cost(0.0, 0)
    times = [costs.get(op.name, none).time for op in wanted.ops]
    workspaces = [
        costs.get(op.name, none).workspace_bytes
        + state_bytes(program.calls.get(op.name), program.device)
        for op in wanted.ops
    ]
    if wanted.boundary is not None:
        workspaces[wanted.boundary_index] = loss.workspace_bytes
    return times, workspaces


def _costs_like(graph: Graph, of: Program, program: Program) -> dict[str, Cost]:
    """Find what the ops of a program take, by the graph of one of other sizes."""
    costs = {op: _scaled(graph, of, program, op) for op in program.calls}
    with_runs_again(program, costs)
    return costs


def _scaled(graph: Graph, of: Program, program: Program, name: str) -> Cost:
    op, call, before = graph.ops[graph.op_index[name]], program.calls[name], of.calls[name]
    touched, then = _touched_bytes(program, name), _touched_bytes(of, name)
    ratio = touched / then if then else 1.0
    own, declared = op.workspace_bytes - state_bytes(call, program.device), call.workspace_bytes
    grown = max(1.0, ratio)
    if before.workspace_bytes:
        grown = max(grown, declared / before.workspace_bytes)
    return Cost(op.time * ratio, math.ceil(own * grown))


def _touched_bytes(program: Program, op: str) -> int:
    """Sum what a call touches; in slices all that is inside, and what is whole for each of them."""
    call = program.calls[op]
    if call.target is not run_in_slices:
        return program.touched_bytes(op, ())
    body, slices, *_ = call.args
    return sum(
        math.prod(facts.shape)
        * facts.dtype.itemsize
        * (1 if isinstance(body.places.get(name, WHOLE), Sliced) else slices)
        for name, facts in body.facts.items()
    )


def loss_in_proportion(loss: LossCost, program: Program, of: Program) -> LossCost:
    """Give what a loss takes of the outputs of a program, of what it took of those of another."""
    bytes_, of_bytes = _held_bytes(program), _held_bytes(of)
    if not of_bytes:
        return loss
    return LossCost(
        -(-loss.workspace_bytes * bytes_ // of_bytes), -(-loss.kept_bytes * bytes_ // of_bytes)
    )


def _held_bytes(program: Program) -> int:
    values = {program.storage[name] for name in program.held}
    return sum(program.facts[value].storage_bytes for value in values)
