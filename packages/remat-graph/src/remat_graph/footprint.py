"""What a schedule holds, for values of any sizes: simulated in a moment, and made once."""

from __future__ import annotations

from collections.abc import Sequence

from remat_graph.graph import Graph
from remat_graph.schedule import Compute, Free, Schedule, freed_next, simulate

__all__ = ["Footprint"]


class Footprint:
    """The steps of a legal schedule, to be weighed for graphs of the same ops and other sizes.

    Raises:
        InvalidSchedule: if it is no schedule of the graph.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        simulate(graph, schedule)
        place = {value.name: at for at, value in enumerate(graph.values)}
        self._steps: list[tuple[int, list[int], list[int], list[int]]] = []
        alive: set[str] = set()
        overwritten: set[str] = set()
        gone: list[int] = []
        for position, step in enumerate(schedule.steps):
            if isinstance(step, Free):
                alive.remove(step.value)
                if step.value not in overwritten:
                    gone.append(place[step.value])
                continue
            assert isinstance(step, Compute)
            at = graph.op_index[step.op]
            op = graph.ops[at]
            dying = freed_next(schedule.steps, position) if op.overwrites else frozenset[str]()
            pairs = [(read, new) for read, new in op.overwrites if read in dying]
            overwritten = {read for read, _ in pairs}
            in_place = [place[new] for _, new in pairs]
            gone = [place[value] for value in op.outputs if value in alive]
            self._steps.append((at, [place[value] for value in op.outputs], in_place, gone))
            alive.update(op.outputs)

    def peak_bytes(self, sizes: Sequence[int], workspaces: Sequence[int]) -> int:
        """Give the peak of the schedule for values of these sizes, and ops with these workspaces.

        Both are in bytes, in the order of the graph.
        """
        held = peak = 0
        for op, made, in_place, gone in self._steps:
            for value in made:
                held += sizes[value]
            for value in in_place:
                held -= sizes[value]
            during = held + workspaces[op]
            if during > peak:
                peak = during
            for value in gone:
                held -= sizes[value]
        return peak
