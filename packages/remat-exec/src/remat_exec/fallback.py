"""A backward for gradients that were not planned for, over what the planned forward kept.

Each backward op runs in order; what it reads and is gone is computed again just before, and freed
after its last use. Nothing here minimises memory: the simulator tells what it takes.
"""

from __future__ import annotations

from remat_graph import Compute, Free, Graph, Schedule, Step

from remat_exec.errors import BackwardError

__all__ = ["backward_from"]


def backward_from(graph: Graph, forward: tuple[Step, ...]) -> Schedule:
    """Complete the forward steps of another plan by a backward of `graph`.

    Raises:
        BackwardError: if something needed is gone and can only be computed once.
    """
    alive: dict[str, None] = {}
    for step in forward:
        if isinstance(step, Free):
            del alive[step.value]
        else:
            alive.update(dict.fromkeys(graph.ops[graph.op_index[step.op]].outputs))
    order = range(graph.boundary_index, len(graph.ops))
    last_use = {v: max(users, default=-1) for v, users in graph.consumers.items()}
    steps = list(forward)

    def ensure(value: str) -> None:
        if value in alive or value in graph.resident:
            return
        op = graph.ops[graph.producer[value]]
        if not op.replayable:
            raise BackwardError(
                f"this backward needs {value!r}, made by {op.name!r}, which can run only once and "
                f"whose result the plan did not keep; run forward again, it will be planned anew"
            )
        compute(op.name)

    def compute(name: str) -> None:
        op = graph.ops[graph.op_index[name]]
        for value in op.inputs:
            ensure(value)
        steps.append(Compute(name))
        alive.update(dict.fromkeys(op.outputs))

    for index in order:
        compute(graph.ops[index].name)
        for value in [v for v in alive if last_use[v] <= index and v not in graph.results]:
            steps.append(Free(value))
            del alive[value]
    return Schedule(tuple(steps))
