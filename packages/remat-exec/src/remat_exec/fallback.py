"""A backward for gradients that were not planned for, over what the planned forward kept.

The planned order of computations is followed as far as the other graph has them, with its
recomputations; what is missing is computed just before it is read, and each value is freed after
its last use. With fewer gradients than planned for this takes no more memory than the plan; with
others the simulator tells what it takes.
"""

from __future__ import annotations

from collections.abc import Container

from remat_exec.errors import BackwardError
from remat_graph import Compute, Free, Graph, Op, Schedule, Step

__all__ = ["backward_from"]


def backward_from(graph: Graph, planned: Schedule, planned_values: Container[str]) -> Schedule:
    """Complete the forward half of a plan, made for another backward, by a backward of `graph`.

    `planned_values` are the values of the graph that was planned; it may lack what that backward
    never reads, such as the mask of a dropout, and its forward does not keep those.

    Raises:
        BackwardError: if something needed is gone and can only be computed once.
    """
    loss = planned.steps.index(Compute("loss"))
    forward, kept = _forward_of(graph, planned.steps[:loss], planned_values)
    order = _computations(graph, planned.steps[loss:], kept)
    return Schedule((*forward, *_with_frees(graph, kept, order)))


def _forward_of(
    graph: Graph, planned: tuple[Step, ...], planned_values: Container[str]
) -> tuple[tuple[Step, ...], dict[str, None]]:
    """Follow the planned forward; `graph` may know fewer of what it packs, and of its values."""
    alive: dict[str, None] = {}
    steps: list[Step] = []
    for step in planned:
        if isinstance(step, Compute):
            if step.op not in graph.op_index:
                continue
            outputs = graph.ops[graph.op_index[step.op]].outputs
            alive.update(dict.fromkeys(value for value in outputs if value in planned_values))
            steps += [step, *(Free(value) for value in outputs if value not in planned_values)]
        elif step.value in alive:
            del alive[step.value]
            steps.append(step)
    return tuple(steps), alive


def _computations(graph: Graph, planned: tuple[Step, ...], kept: dict[str, None]) -> list[str]:
    alive = dict(kept)
    order: list[str] = []

    def compute(name: str) -> None:
        op = graph.ops[graph.op_index[name]]
        for value in op.inputs:
            if value not in alive and value not in graph.resident:
                maker = _maker(graph, value, alive)
                if not maker.replayable and maker.name in computed:
                    raise BackwardError(
                        f"this backward needs {value!r}, made by {maker.name!r}, which can run "
                        f"only once and whose result the plan did not keep; run forward again, it "
                        f"will be planned anew, if the budget has room for that"
                    )
                compute(maker.name)
        order.append(name)
        computed.add(name)
        outputs.update(op.outputs)
        alive.update(dict.fromkeys(op.outputs))

    computed = {op.name for op in graph.ops[: graph.boundary_index] if op.owed}
    outputs: set[str] = set()
    for step in planned:
        if isinstance(step, Free):
            if _can_come_back(graph, step.value):
                alive.pop(step.value, None)
        elif step.op in graph.op_index:
            compute(step.op)
    for op in graph.ops[graph.boundary_index :]:
        by_others = bool(op.outputs) and outputs.issuperset(op.outputs)
        if op.owed and op.name not in computed and not by_others:
            compute(op.name)
    for value in sorted(graph.results - graph.resident):
        if value not in alive:
            compute(_maker(graph, value, alive).name)
    return order


def _maker(graph: Graph, value: str, alive: dict[str, None]) -> Op:
    """Choose a maker of a value, if one does all of whose inputs are there, else its producer."""
    makers = [graph.ops[index] for index in graph.makers[value]]
    for op in makers:
        if op.replayable and all(v in alive or v in graph.resident for v in op.inputs):
            return op
    return makers[0]


def _can_come_back(graph: Graph, value: str) -> bool:
    """Whether a value may go where the plan freed it; the last use frees the others."""
    if value in graph.results or value not in graph.producer:
        return False
    return graph.ops[graph.producer[value]].replayable


def _with_frees(graph: Graph, kept: dict[str, None], order: list[str]) -> list[Step]:
    """Free each value after its last use before it is made again; drop what nothing uses."""
    needed = set(graph.results)
    first = {name: position for position, name in reversed(list(enumerate(order)))}
    reversed_steps: list[Step] = []
    for position in range(len(order) - 1, -1, -1):
        op = graph.ops[graph.op_index[order[position]]]
        again = first[op.name] < position or graph.op_index[op.name] < graph.boundary_index
        if (again or not op.owed) and not needed.intersection(op.outputs):
            continue
        reads = [v for v in op.inputs if v not in graph.resident]
        dead = [v for v in (*op.outputs, *reads) if v not in needed]
        reversed_steps.extend(Free(v) for v in dict.fromkeys(dead))
        reversed_steps.append(Compute(op.name))
        needed.difference_update(op.outputs)
        needed.update(reads)
    dropped = [v for v in kept if v not in needed]
    return [*(Free(v) for v in dropped), *reversed(reversed_steps)]
