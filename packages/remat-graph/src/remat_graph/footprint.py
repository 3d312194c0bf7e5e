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
        self.schedule = schedule
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

    @property
    def ops(self) -> list[int]:
        """The ops that it runs, in order, by their place in the graph."""
        return [op for op, *_ in self._steps]

    def held_bytes(self, sizes: Sequence[int], workspaces: Sequence[int]) -> list[int]:
        """Give what is held while each of `ops` runs, for these sizes of values and workspaces.

        Both are in bytes, in the order of the graph. As the simulator's `during_bytes`, without the
        steps that free: these hold no more than the op before them.
        """
        held, during = 0, []
        for op, made, in_place, gone in self._steps:
            for value in made:
                held += sizes[value]
            for value in in_place:
                held -= sizes[value]
            during.append(held + workspaces[op])
            for value in gone:
                held -= sizes[value]
        return during
