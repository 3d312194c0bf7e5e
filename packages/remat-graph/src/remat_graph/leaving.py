"""Ops at which gradients leave: whoever gets them may step the optimizer and let go of them.

Such an op reads gradients and the parameters that they are of, makes nothing, and runs once. As the
parameters may change in it, no op may read them after it, not even one that runs again. That is no
rule of graphs, which solvers would have to know: what they give is put right by `leave_late`, and
`reads_after_leaving` is for those who run a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from remat_graph.graph import Graph, Op, Stage
from remat_graph.schedule import Compute, Free, Schedule, Step

__all__ = [
    "leave_late", "leaves", "put_in_leaves", "reads_after_leaving", "with_leaves", "without_leaves",
]  # fmt: skip

_LEAVE = "leave@"  # no name of a variable
_MOST_LEAVES = 256  # times that gradients leave, about


def leaves(op: str) -> bool:
    """Whether this is the name of an op at which gradients leave."""
    return op.startswith(_LEAVE)


def with_leaves(
    ops: Sequence[Op], sizes: Mapping[str, int], leaving: Mapping[str, str]
) -> list[Op]:
    """Put in the ops at which gradients leave, each as early as all of its gradients can.

    `leaving` maps the value of such a gradient to that of its parameter. What reads a parameter
    comes before: it may change there. Small gradients wait for others.
    """
    touched: dict[str, list[int]] = {}
    for at, op in enumerate(ops):
        for value in dict.fromkeys((*op.inputs, *op.outputs)):
            touched.setdefault(value, []).append(at)
    ready = {g: max([*touched[g], *touched.get(p, ())]) for g, p in leaving.items()}
    enough = sum(sizes[g] for g in leaving) // _MOST_LEAVES
    behind: dict[int, list[Op]] = {}
    group: list[str] = []
    for number, gradient in enumerate(order := sorted(ready, key=lambda g: ready[g])):
        group.append(gradient)
        if sum(sizes[g] for g in group) < enough and gradient != order[-1]:
            continue
        inputs = (*group, *dict.fromkeys(leaving[g] for g in group))
        behind.setdefault(ready[gradient], []).append(
            Op(
                f"{_LEAVE}{number}", inputs, (), 0.0, stage=Stage.BACKWARD, replayable=False,
                order_after=tuple(
                    op.name
                    for op in ops
                    if op.stage is Stage.BACKWARD
                    and op.owed
                    and not set(inputs).isdisjoint((*op.inputs, *op.outputs))
                ),
            )
        )  # fmt: skip
        group = []
    return [each for at, op in enumerate(ops) for each in (op, *behind.get(at, ()))]


def reads_after_leaving(graph: Graph, schedule: Schedule) -> tuple[str, str] | None:
    """Find an op that touches a gradient or its parameter after that has left: both names.

    `None` if there is none.
    """
    left: set[str] = set()
    for step in schedule.steps:
        if isinstance(step, Compute):
            op = graph.ops[graph.op_index[step.op]]
            late = left.intersection((*op.inputs, *op.outputs))
            if late:
                return op.name, min(late)
            if leaves(op.name):
                left.update(op.inputs)
    return None


def leave_late(graph: Graph, schedule: Schedule) -> Schedule:
    """Move the ops at which gradients leave behind the last that touches what they read.

    What is freed of that is freed there. It is the schedule itself if nothing moves.
    """
    if not any(leaves(op.name) for op in graph.ops):
        return schedule
    steps = schedule.steps
    at: dict[str, int] = {}
    last: dict[str, int] = {}
    freed: dict[str, int] = {}
    for position, step in enumerate(steps):
        if isinstance(step, Free):
            freed[step.value] = position
        elif leaves(step.op):
            at[step.op] = position
        else:
            op = graph.ops[graph.op_index[step.op]]
            last.update(dict.fromkeys((*op.inputs, *op.outputs), position))
    late: dict[int, list[str]] = {}
    dropped: set[int] = set()
    for name, position in at.items():
        inputs = graph.ops[graph.op_index[name]].inputs
        due = max((last.get(v, -1) for v in inputs), default=-1)
        if due > position:
            while due + 1 < len(steps) and isinstance(steps[due + 1], Free):
                due += 1  # what is freed there may be written over
            late.setdefault(due, []).append(name)
            dropped |= {position, *(freed[v] for v in inputs if v in freed)}
    if not late:
        return schedule
    moved: list[Step] = []
    for position, step in enumerate(steps):
        if position not in dropped:
            moved.append(step)
        for name in late.get(position, ()):
            inputs = graph.ops[graph.op_index[name]].inputs
            moved += [Compute(name), *(Free(v) for v in inputs if v in freed)]
    return Schedule(tuple(moved))


def without_leaves(graph: Graph) -> Graph:
    """Give the graph in which the gradients that leave are held to the end, as results.

    It is the graph itself if none leaves.
    """
    leaving = [op for op in graph.ops if leaves(op.name)]
    if not leaving:
        return graph
    gradients = {v for op in leaving for v in op.inputs if v not in graph.resident}
    ops = tuple(op for op in graph.ops if not leaves(op.name))
    return replace(graph, ops=ops, results=graph.results | gradients)


def put_in_leaves(graph: Graph, schedule: Schedule) -> Schedule:
    """Turn a schedule of `without_leaves(graph)` into one of the graph, which takes no more.

    Each gradient leaves behind the last that touches it or its parameter.
    """
    leaving = [op for op in graph.ops if leaves(op.name)]
    gradients = [v for op in leaving for v in op.inputs if v not in graph.resident]
    first = (Compute(op.name) for op in leaving)  # where all are late
    return leave_late(graph, Schedule((*first, *schedule.steps, *map(Free, gradients))))
