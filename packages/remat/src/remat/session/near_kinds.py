"""Kinds of regions whose sizes are near known ones: weighed in a moment, by what is known of these.

The options of such a region are the schedules of the other, which `Footprint`s weigh for its sizes,
and its code is that of the first such size. Its graph is made if a step is planned by it.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from remat.planning.region_slices import alone
from remat.session.awaited_plan import MOST_EARLIER
from remat.session.changes import Exposed
from remat.session.kinds import RegionKind, deferred_by, plain_bytes
from remat_exec import Ability, Executor, Runnable, abilities_of
from remat_graph import Footprint, Graph, Schedule, leaves
from remat_graph.torch import Capture, SizedCapture
from remat_solvers import store_all
from remat_solvers.step import RegionFront, RegionOption, front_from_schedules, weigh_options

__all__ = ["Kinds", "NearKind", "OtherSizes", "sizes_of"]

_MOST_NEAR = 1024  # kinds of sizes that are near others, beside those in use


def sizes_of(capture: SizedCapture) -> Hashable:
    """Name the trace of a capture, and its sizes."""
    return capture.way_of_trace, capture.sizes_of_trace


class OtherSizes:
    """What a `kind` that was measured has in common with those of sizes that are near.

    `capture` is as it was traced and measured, `program` what it runs as.
    """

    def __init__(
        self, number: int, kind: RegionKind, capture: SizedCapture, program: SizedCapture
    ) -> None:
        self.number, self.kind, self.capture, self.program = number, kind, capture, program
        self.has_other_ops = program is not capture
        self.exposed: Exposed | None = None
        self.runnables: dict[tuple[int, bool], tuple[Schedule, Any]] = {}
        self._footprints: dict[int, Footprint] = {}

    @functools.cached_property
    def leaves(self) -> bool:
        """Whether gradients leave at once, of which a footprint knows nothing."""
        return any(leaves(op.name) for op in self.kind.front.graph.ops)

    def footprint(self, schedule: Schedule) -> Footprint:
        """Give what a schedule of the kind holds, found once."""
        if id(schedule) not in self._footprints:
            self._footprints[id(schedule)] = Footprint(self.kind.front.graph, schedule)
        return self._footprints[id(schedule)]

    @functools.cached_property
    def as_traced(self) -> tuple[Graph, Footprint]:
        """The graph without slices and groups, and what storing everything of that holds."""
        graph = self.capture.graph
        return graph, Footprint(graph, store_all(graph))


class NearKind(RegionKind):
    """A kind of region of sizes that are near those of another, which runs as a `program`.

    Raises:
        InvalidProblem: if the graph of the other has no op at a boundary that runs once.
    """

    def __init__(
        self,
        name: str,
        near: OtherSizes,
        capture: SizedCapture,
        program: SizedCapture,
        find_in_slices: Callable[[], RegionFront | None] | None,
    ) -> None:
        kind = near.kind
        self.name, self.number = name, -1
        self.near, self._capture, self._program = near, capture, program
        self.missing, self.family = kind.missing, kind.family
        self.sliced, self.unfused = kind.sliced, kind.unfused
        self.deferred = deferred_by(program) if kind.deferred else ()
        self.least_bytes = 0 if near.has_other_ops else None
        self.find_in_slices = find_in_slices
        self._lean, self._alike, self._read = {}, {}, {}

    @functools.cached_property
    def front(self) -> RegionFront:  # type: ignore[override]
        """Its options with what is proved of its graph."""
        return front_from_schedules(alone(self._program).graph, self.near.kind.footprints)

    @functools.cached_property
    def whole(self) -> Graph | None:  # type: ignore[override]
        """The graph without slices and groups, if it runs as another."""
        return self._capture.graph if self.near.has_other_ops else None

    @functools.cached_property
    def _figures(self) -> tuple[list[int], list[int], list[float]]:
        """The bytes of its values, and the workspaces in bytes and the seconds of its ops."""
        near = self.near
        graph = near.kind.front.graph
        times, workspaces = self._program.op_costs_like(near.program, graph)
        return self._program.sizes_of(graph), workspaces, times

    def _weighed(self, footprints: Sequence[Footprint]) -> list[RegionOption]:
        return weigh_options(self.near.kind.front.graph, footprints, *self._figures)

    @functools.cached_property
    def options(self) -> Sequence[RegionOption]:
        """The schedules of the other, for these sizes."""
        return self._weighed(self.near.kind.footprints)

    @functools.cached_property
    def everything(self) -> RegionOption:
        """What it costs to store everything."""
        return self._measured(self.near.kind.everything.schedule)

    @functools.cached_property
    def plain_bytes(self) -> int | None:  # type: ignore[override]
        """What plain autograd keeps, where that is not what storing everything does."""
        near = self.near
        if near.kind.plain_bytes is None or self.missing or self.deferred:
            return plain_bytes(self._program)
        graph, footprint = near.as_traced
        times, workspaces = self._capture.op_costs_like(near.capture, graph)
        sizes = self._capture.sizes_of(graph)
        return weigh_options(graph, [footprint], sizes, workspaces, times)[0].kept_bytes

    @property
    def incoming_bytes(self) -> int:
        """The bytes of the gradients that come in between the halves."""
        graph = self.near.kind.front.graph
        made = set(graph.ops[graph.boundary_index].outputs)
        pairs = zip(graph.values, self._figures[0], strict=True)
        return sum(size for value, size in pairs if value.name in made)

    def _measured(self, schedule: Schedule) -> RegionOption:
        return self._weighed([self.near.footprint(schedule)])[0]

    def exposed(self, capture: Capture) -> Exposed:
        """Find what a capture of this kind has exposed, once for all sizes of a trace."""
        near = self.near
        if not near.program.is_of_trace(capture):  # an equal region elsewhere
            return Exposed.of(capture)
        if near.exposed is None:
            near.exposed = Exposed.of(capture)
        return near.exposed

    def runnable(
        self, capture: Capture, option: RegionOption, lean: Runnable | None, executor: Executor
    ) -> Runnable:
        """Give what runs an option, by the code of another size where that is for all."""
        if Ability.RUNS_OTHER_SIZES not in abilities_of(executor):
            return executor(capture, option.schedule, low_memory_plan=lean)
        known, key = self.near.runnables, (id(option.schedule), lean is None)
        runnable: Runnable | None = None
        if key in known:
            runnable = known[key][1].at(capture, option.peak_bytes, low_memory_plan=lean)
        if runnable is None:
            runnable = executor(capture, option.schedule, low_memory_plan=lean)
            known[key] = option.schedule, runnable
        return runnable

    def read_by(self, schedule: Schedule) -> frozenset[str]:
        """Find what the backward of a schedule reads."""
        return self.near.kind.read_by(schedule)

    @property
    def graph(self) -> Graph:
        """The graph of the other."""
        return self.near.kind.front.graph

    def has(self, graph: Graph) -> bool:
        """Whether a graph is of this kind: one of other traces has its own."""
        return False

    def is_like(self, capture: Capture) -> bool:
        """Whether a capture takes its schedules: those of the kind that was measured are these."""
        return False


class Kinds:
    """The kinds that were met, by number, and which of them were `measured` for other sizes.

    Of those that are near others the last ones are here, and what is in use: of sizes without end
    there are no more.
    """

    def __init__(self, kinds: Iterable[RegionKind] = ()) -> None:
        self.measured: list[OtherSizes] = []
        self._kinds = dict(enumerate(kinds))
        self._next = len(self._kinds)
        self._near = weakref.WeakValueDictionary[int, NearKind]()
        self._by_sizes = weakref.WeakValueDictionary[Hashable, NearKind]()
        self._last = deque[NearKind](maxlen=_MOST_NEAR)

    def __getitem__(self, number: int) -> RegionKind:
        return self._kinds[number] if number in self._kinds else self._near[number]

    def __setitem__(self, number: int, kind: RegionKind) -> None:
        self._kinds[number] = kind

    def __iter__(self) -> Iterator[RegionKind]:
        yield from self._kinds.values()
        yield from list(self._near.values())

    def items(self) -> Iterable[tuple[int, RegionKind]]:
        """Give those with a number that are near no other, in order."""
        return self._kinds.items()

    def outlines_beside(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Give the hashes of the outlines of the first that were met, without some."""
        left_out = set(numbers)
        others = (k for number, k in self._kinds.items() if k.met and number not in left_out)
        return tuple(kind.outline for kind in islice(others, MOST_EARLIER))

    @property
    def next_number(self) -> int:
        """The number of the kind that is added next."""
        return self._next

    def add(self, kind: RegionKind) -> int:
        """Add one; give its number."""
        number = self._next
        self._kinds[number] = kind
        self._next += 1
        return number

    def add_near(self, kind: NearKind, sizes: Hashable) -> None:
        """Add one of sizes that are near, which these name."""
        kind.number = self._next
        self._near[kind.number] = self._by_sizes[sizes] = kind
        self._last.append(kind)
        self._next += 1

    def of_sizes(self, sizes: Hashable) -> tuple[int, OtherSizes] | None:
        """Find the number of the one of these sizes, and by what it runs."""
        near = self._by_sizes.get(sizes)
        if near is not None:
            return near.number, near.near
        same = (each for each in self.measured if sizes_of(each.capture) == sizes)
        return next(((each.number, each) for each in same), None)

    def exchange(self, others: Kinds) -> Kinds:
        """Have other kinds than these, and give these."""
        before = copy.copy(self)
        self.__dict__.update(others.__dict__)
        return before
