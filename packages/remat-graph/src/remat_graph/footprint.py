"""What a schedule holds, for values of any sizes: simulated in a moment, and made once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import add, itemgetter, neg
from typing import Any

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
        self.ops: list[int] = []
        events: list[int] = []  # a value that is made, or that is freed, counted from the end
        during: list[int] = []  # how many of these come before each op runs
        alive: set[str] = set()
        overwritten: set[str] = set()
        for position, step in enumerate(schedule.steps):
            if isinstance(step, Free):
                alive.remove(step.value)
                if step.value not in overwritten:
                    events.append(~place[step.value])
                continue
            assert isinstance(step, Compute)
            at = graph.op_index[step.op]
            op = graph.ops[at]
            dying = freed_next(schedule.steps, position) if op.overwrites else frozenset[str]()
            pairs = [(read, new) for read, new in op.overwrites if read in dying]
            overwritten = {read for read, _ in pairs}
            events += [place[value] for value in op.outputs]
            events += [~place[new] for _, new in pairs]
            self.ops.append(at)
            during.append(len(events))
            events += [~place[value] for value in op.outputs if value in alive]
            alive.update(op.outputs)
        self._of_events, self._of_ops = _taker(events), _taker(self.ops)
        self._during = _taker(during)

    def held_bytes(self, sizes: Sequence[int], workspaces: Sequence[int]) -> list[int]:
        """Give what is held while each of `ops` runs, for these sizes of values and workspaces.

        `ops` are those that it runs, in order, by their place in the graph. All is in bytes, in the
        order of the graph. As the simulator's `during_bytes`, without the steps that free: these
        hold no more than the op before them.
        """
        changes = self._of_events([*sizes, *map(neg, reversed(sizes))])
        held = list(accumulate(changes, initial=0))
        return list(map(add, self._during(held), self._of_ops(workspaces)))

    def seconds(self, times: Sequence[float]) -> float:
        """Sum the seconds of what it runs, of those of each op of the graph."""
        return math.fsum(self._of_ops(times))


def _taker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Give what takes the items at these places, faster than by a loop."""
    if len(places) < 2:
        return lambda items: [items[place] for place in places]
    return itemgetter(*places)
