"""From when to when each value of a schedule is held, and which operation made it.

At every step the sizes of what is held, with the workspace of the operation that runs, add up to
what the simulator says of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remat_graph import Compute, Graph, Schedule, freed_next

__all__ = ["Life", "compute_steps", "lifetimes"]


@dataclass(frozen=True, slots=True)
class Life:
    """One buffer, from the step that makes it up to the first at which it is held no more.

    What is held to the end ends after the step behind the last, `len(schedule) + 1`. `op` is the
    operation that made it; `again` says that the value was made before.
    """

    value: str
    op: str
    start: int
    end: int
    size_bytes: int
    again: bool


def lifetimes(graph: Graph, schedule: Schedule) -> list[Life]:
    """List the buffers of a legal schedule, in the order in which they end."""
    size = graph.value_by_name
    alive: dict[str, tuple[str, int]] = {}
    overwritten: set[str] = set()
    before: set[str] = set()
    ended: list[Life] = []

    def end(value: str, at: int) -> None:
        op, start = alive.pop(value)
        again = value in before
        before.add(value)
        ended.append(Life(value, op, start, at, size[value].size_bytes, again))

    for position, step in enumerate(schedule.steps):
        if not isinstance(step, Compute):
            if step.value not in overwritten:
                end(step.value, position + 1)
            continue
        op = graph.ops[graph.op_index[step.op]]
        dying = freed_next(schedule.steps, position) if op.overwrites else set()
        overwritten = {read for read, _ in op.overwrites if read in dying}
        for value in overwritten:
            end(value, position)
        for value in op.outputs:
            if value in alive:  # both copies are held while it runs
                end(value, position + 1)
            alive[value] = (op.name, position)
    for value in list(alive):
        end(value, len(schedule) + 1)
    return ended


def compute_steps(schedule: Schedule) -> Iterator[tuple[int, str]]:
    """List the steps that run an operation, with its name."""
    for position, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            yield position, step.op
