"""Which gradients the backward gives out together, and when."""

from __future__ import annotations

from dataclasses import dataclass

from remat_graph import Compute, Graph, Step, leaves
from remat_graph.torch import Program

__all__ = ["Group", "group_gradients"]

_GROUPS = 16
_GROUP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Group:
    """Gradients that the backward gives out together: program inputs, in the order given.

    Where none of the gradients that one depends on came, `None` is given out in its place.
    """

    inputs: tuple[str, ...]


def group_gradients(
    program: Program, graph: Graph, steps: tuple[Step, ...], unwanted: frozenset[str]
) -> dict[int, list[tuple[str, ...]]]:
    """Group the gradients by when they can be given out.

    That is after the last step that touches the gradient, and also the last that reads what it is
    the gradient of: whoever gets it may change that at once (an optimizer step within backward).
    Those that leave together in the graph are a group; the others are put together by size.
    """
    final: dict[str, int] = {}
    leaving: dict[str, str] = {}
    for position, step in enumerate(steps):
        if isinstance(step, Compute):
            op = graph.ops[graph.op_index[step.op]]
            final.update(dict.fromkeys((*op.inputs, *op.outputs), position))
            if leaves(op.name):
                leaving.update(dict.fromkeys(op.inputs, op.name))
    storage = program.storage
    due_at = {
        name: max(final.get(storage[g], -1), final.get(storage[name], -1))
        for name, g in program.gradients.items()
        if name not in unwanted
    }
    order = sorted(due_at, key=lambda name: due_at[name])
    sizes = {program.storage[g]: program.facts[g].storage_bytes for g in program.gradients.values()}
    enough = max(sum(sizes.values()) // _GROUPS, _GROUP_BYTES)
    due: dict[int, list[tuple[str, ...]]] = {}
    together: dict[str, list[str]] = {}
    for name in order:
        op_name = leaving.get(storage[program.gradients[name]])
        if op_name is not None:
            together.setdefault(op_name, []).append(name)
    for names in together.values():
        due.setdefault(due_at[names[-1]], []).append(tuple(names))
        order = [name for name in order if name not in names]
    group: list[str] = []
    held = 0
    for name in order:
        group.append(name)
        held += sizes[storage[program.gradients[name]]]
        if held >= enough or name == order[-1]:
            due.setdefault(due_at[name], []).append(tuple(group))
            group, held = [], 0
    return due
