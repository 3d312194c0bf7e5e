"""Finds options of one region, and bounds on the time of all its schedules.

The bytes kept between the halves are spread from the least possible to those of storing everything.
At each, the fastest schedule with no limit on its peaks is known exactly (`bounds.kept_bytes`).
The search for the minimal peak then finds a schedule that both keeps and holds little. Lower peaks
are sought by a solver: the rest of the step nests inside the op at the boundary, so that a
workspace of `M - K - t` there (`t` is what it makes) lets a schedule within a budget of M keep K at
most. So any solver of this package plans a region, and the bound that it proves is one on all
schedules that keep at most K and peak at M at most.

Guarantee: figures of options are the simulator's; bounds hold for all schedules in the order of the
graph. Complexity: one small program per point, and one solve for up to as many lower peaks.
Limits: a graph that is not proved within its share of the time gets a weaker bound; a peak below
what comes in at the boundary is not solved for.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat_graph import Footprint, Graph, Hierarchy, Schedule, Status, leaves
from remat_solvers.bounds.kept_bytes import KeptBytesProgram
from remat_solvers.bounds.peak import while_running
from remat_solvers.core.alternatives import is_in_order
from remat_solvers.core.milp import HIGHS
from remat_solvers.core.problem import Limit, Problem, Solver, check_whole
from remat_solvers.core.store_all import store_all
from remat_solvers.core.trust import distrust
from remat_solvers.core.wiring import Wiring, expand, sequence_of
from remat_solvers.errors import BackEndFailed
from remat_solvers.minimal_peak.budget import smallest_budget
from remat_solvers.registry import resolve_solver
from remat_solvers.solve import AUTO, search
from remat_solvers.step.options import (
    ANY_BYTES,
    RegionBound,
    RegionFront,
    RegionOption,
    boundary_op,
    incoming_bytes,
    measure_option,
    weigh_options,
)
from remat_solvers.verdicts import Claim, doubt_or_raise

__all__ = ["front_from_schedules", "refined_options", "region_front"]

_SMALLEST_SHARE = 0.25  # of the time, for the minimal peak
_KEEPING_SHARE = 0.5  # of the time, if it is for one point
_SMALLEST_SECONDS, _SMALLEST_SECONDS_PER_OP = 0.3, 2e-3
_SMALLEST_AT_LEAST = 0.2  # seconds for it beyond any limit: what is not found is refused
_POINT_SECONDS, _POINT_OPS = 0.08, 100  # more seconds, with the square of the ops
_FINER = 3  # values of what is kept per point
_PEAKS = (0.5, 0.1)  # of the way from the minimal peak to the highest
_CLOSE = 1e-6  # of a time, within which two are the same

_log = logging.getLogger(__name__)


def region_front(
    graph: Graph,
    *,
    most_bytes: int | None = None,
    solver: str | Solver = "refine",
    limit_seconds: float = 10.0,
    points: int = 8,
    hierarchy: Hierarchy | None = None,
    known: Iterable[Schedule | Footprint] = (),
) -> RegionFront:
    """Find schedules of a region that trade what they keep and their peaks against time.

    No option is as good as another in all of `kept_bytes`, `forward_bytes`, `backward_bytes` and
    `time`. Among them are storing everything; one that keeps the least of all; one of the least
    peak that is found; and one that keeps hardly more than the least and peaks hardly higher than
    that, whatever their time. Of the others, none peaks above `most_bytes`: nor does
    storing everything. About three times as many values of `kept_bytes` as `points` are tried, and
    as many lower peaks as `points`. `limit_seconds` is for all together, but for the least peak it
    looks up to half a second in any case; graphs of less than 100 ops take about a second.
    Schedules that are `known`, as for `front_from_schedules`, are where the search begins.

    Raises:
        InvalidProblem: if the graph has no op at its boundary that runs once (see
            `RegionOption`), or an argument is not what it should be.
        InvalidSchedule: if a known schedule is not legal for it.
        SolverError: as `solve` for an unknown, unsuitable or broken solver.
    """
    boundary_op(graph)
    check_whole("points", points, least=2)
    _check_solver(solver)
    if most_bytes is not None:
        check_whole("most_bytes", most_bytes)
    Problem(graph, 1, hierarchy)
    import cvxpy  # noqa: F401, PLC0415 - takes a second, which no region's limit is to pay

    limit = Limit.starting_now(limit_seconds)
    options = _weighed(graph, known)
    return _Search(graph, most_bytes or ANY_BYTES, solver, hierarchy, limit).run(points, options)


def front_from_schedules(graph: Graph, schedules: Iterable[Schedule | Footprint]) -> RegionFront:
    """Give schedules that are known as options of a region, without solving.

    Proved is what ops need one by one, and nothing of times. A footprint is that of a graph of the
    same ops and other sizes, of which the schedule is known to be legal.

    Raises:
        InvalidProblem: if the graph has no op at its boundary that runs once.
        InvalidSchedule: if a schedule is not legal for it.
    """
    boundary_op(graph)
    return _empty_front(graph, Wiring.of(graph), 0).with_(_weighed(graph, schedules), [])


def refined_options(
    front: RegionFront,
    *,
    kept_bytes: int,
    peak_bytes: int,
    solver: str | Solver = "refine",
    limit_seconds: float = 10.0,
    hierarchy: Hierarchy | None = None,
) -> RegionFront:
    """Solve a region again at exactly these limits, and merge in what is found and proved.

    The limits are on what is kept between the halves and on the peak of either half; they come of
    the step's choice, such as what it has left beyond the option that it chose. What is proved
    already is not solved again.

    Raises:
        InvalidProblem: if a limit is no whole number, or the hierarchy is of another graph.
        SolverError: as `solve` for an unknown, unsuitable or broken solver.
    """
    check_whole("kept_bytes", kept_bytes, least=0)
    check_whole("peak_bytes", peak_bytes)
    _check_solver(solver)
    Problem(front.graph, 1, hierarchy)
    limit = Limit.starting_now(limit_seconds)
    if _is_closed(front, kept_bytes, peak_bytes):
        return front
    region_search = _Search(front.graph, peak_bytes, solver, hierarchy, limit)
    seconds = _KEEPING_SHARE * limit.left(math.inf)
    front = region_search.keep(front, kept_bytes, seconds, KeptBytesProgram(Wiring.of(front.graph)))
    if _is_closed(front, kept_bytes, peak_bytes):
        return front
    return region_search.solve(front, kept_bytes, peak_bytes, limit.left(math.inf))


def _check_solver(solver: str | Solver) -> None:
    """Refuse a solver that is not there, whether or not there will be time to ask it."""
    if solver != AUTO:
        resolve_solver(solver)


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for options of one region."""

    graph: Graph
    most_bytes: int
    solver: str | Solver
    hierarchy: Hierarchy | None
    limit: Limit

    def run(self, points: int, known: Sequence[RegionOption]) -> RegionFront:
        """Spread what is kept, then look for lower peaks."""
        keeping = KeptBytesProgram(Wiring.of(self.graph))
        everything = measure_option(self.graph, store_all(self.graph))
        least_kept, proved = keeping.least_bytes(self._seconds(4 * points))
        front = _empty_front(self.graph, keeping.wiring, proved).with_([everything, *known], [])
        front, lowest = self._lowest(front, 0)
        leanest = lowest
        if (more := lowest.kept_bytes - least_kept) > 0:
            # Less than none where outputs are let go of at the boundary, which count as kept.
            spare = lowest.peak_bytes - lowest.kept_bytes - incoming_bytes(self.graph)
            if spare + more > 0:
                front, leanest = self._lowest(front, spare + more)
        levels = _spread(least_kept, everything.kept_bytes, _FINER * (points - 1) + 1)
        for done, level in enumerate(reversed(levels)):
            if not _is_closed(front, level, ANY_BYTES):
                remaining = points + len(levels) - done
                front = self.keep(front, level, self._seconds(remaining), keeping)
        least = min(front.options, key=lambda o: (o.kept_bytes, o.peak_bytes, o.time))
        lowest = min(lowest, leanest, *known, key=lambda o: o.peak_bytes)
        boxes = self._boxes(front, levels, lowest.peak_bytes, points)
        for done, (level, peak) in enumerate(boxes):
            if not _is_closed(front, level, peak):
                front = self.solve(front, level, peak, self._seconds(len(boxes) - done))
        kept = [o for o in front.options if o.peak_bytes <= self.most_bytes]
        return dataclasses.replace(front, options=()).with_([*kept, least, lowest, leanest], [])

    def keep(
        self, front: RegionFront, kept_bytes: int, seconds: float, keeping: KeptBytesProgram
    ) -> RegionFront:
        """Find the fastest schedule that keeps so many bytes, whatever its peaks."""
        fastest = keeping.fastest(kept_bytes, seconds)
        if fastest is None:
            return front
        option = measure_option(self.graph, expand(keeping.wiring, fastest.sequence))
        bound = RegionBound(kept_bytes, ANY_BYTES, fastest.lower_bound)
        return self._merged(front, [option], [bound])

    def solve(
        self, front: RegionFront, kept_bytes: int, peak_bytes: int, seconds: float
    ) -> RegionFront:
        """Ask the solver within a box, with a workspace at the boundary that stands for it."""
        tangents = incoming_bytes(self.graph)
        kept_bytes = min(kept_bytes, peak_bytes - tangents)
        if kept_bytes < 0 or seconds <= 0:
            return front
        graph = _with_workspace(self.graph, peak_bytes - kept_bytes - tangents)
        hierarchy = self.hierarchy and dataclasses.replace(self.hierarchy, graph=graph)
        start = _start(front, kept_bytes, peak_bytes)
        problem = Problem(graph, peak_bytes, hierarchy, None, start)
        try:
            answer = search(problem, self.solver, Limit.starting_now(seconds))
        except BackEndFailed as error:
            if error.back_end != HIGHS:  # which has no licence that could be missing
                raise
            _log.warning("%s", error)
            return front
        options = [] if answer.schedule is None else [measure_option(self.graph, answer.schedule)]
        time = math.inf if answer.status is Status.INFEASIBLE else answer.lower_bound
        bounds = [] if time is None else [RegionBound(kept_bytes, peak_bytes, time)]
        return self._merged(front, options, bounds)

    def _merged(
        self, front: RegionFront, options: Sequence[RegionOption], bounds: Sequence[RegionBound]
    ) -> RegionFront:
        """Merge in what is found and proved; what an option refutes is given up.

        Raises:
            BrokenSolver: if a solver said so, and no back end of ours.
        """
        all_options = (*front.options, *options)
        held = [b for b in (*front.bounds, *bounds) if not self._is_refuted(b, all_options)]
        return dataclasses.replace(front, bounds=tuple(held)).with_(options, [])

    def _is_refuted(self, bound: RegionBound, options: Sequence[RegionOption]) -> bool:
        """Say whether an option within the box of a bound is faster; then blame who proved it."""
        for option in options:
            fits = option.kept_bytes <= bound.kept_bytes and option.peak_bytes <= bound.peak_bytes
            if fits and option.time * (1 + _CLOSE) < bound.time and self._is_in_order(option):
                box = f"{bound.kept_bytes} bytes kept and {bound.peak_bytes} at the peak"
                cause = f"claims the bound {bound.time} at {box}, but an option takes {option.time}"
                if bound.peak_bytes == ANY_BYTES:  # as `keep` proves
                    distrust(HIGHS, f"it {cause}")
                else:
                    by = None if self.solver == AUTO else resolve_solver(self.solver)
                    doubt_or_raise(Claim(by, bound.peak_bytes, bound.time, ""), cause)
                return True
        return False

    def _is_in_order(self, option: RegionOption) -> bool:
        wiring = Wiring.of(self.graph)
        return is_in_order(wiring, sequence_of(wiring, option.schedule))

    def _lowest(self, front: RegionFront, spare_bytes: int) -> tuple[RegionFront, RegionOption]:
        """Look for the minimal peak of schedules that leave so much of it between the halves."""
        count = len(self.graph.ops)
        seconds = _SMALLEST_SECONDS + _SMALLEST_SECONDS_PER_OP * count
        seconds = min(seconds, _SMALLEST_SHARE * self.limit.left(math.inf))
        seconds = max(seconds, _SMALLEST_AT_LEAST)
        graph = _with_workspace(self.graph, spare_bytes)
        smallest = smallest_budget(graph, limit_seconds=seconds)
        lowest = measure_option(self.graph, smallest.schedule)
        refused = smallest.least_bytes - 1
        kept = refused - incoming_bytes(self.graph) - spare_bytes
        bounds = [RegionBound(kept, refused, math.inf)] if kept >= 0 else []
        return self._merged(front, [lowest], bounds), lowest

    def _boxes(
        self, front: RegionFront, levels: list[int], lowest: int, points: int
    ) -> list[tuple[int, int]]:
        """List the limits to solve for: few bytes kept together with low peaks."""
        highest = min(self.most_bytes, max(o.peak_bytes for o in front.options))
        if highest <= lowest:
            return []
        third = len(levels) // 3
        kept = dict.fromkeys((ANY_BYTES, levels[0], levels[third], levels[2 * third]))
        peaks = [lowest + int(share * (highest - lowest)) for share in _PEAKS]
        boxes = [(level, peak) for level in kept for peak in peaks]
        return [(ANY_BYTES, lowest), *boxes][:points]

    def _seconds(self, remaining: int) -> float:
        """Share out what is left of the time; a small graph needs less."""
        most = _POINT_SECONDS * (1 + (len(self.graph.ops) / _POINT_OPS) ** 2)
        return min(most, self.limit.left(math.inf) / max(1, remaining))


def _weighed(graph: Graph, known: Iterable[Schedule | Footprint]) -> list[RegionOption]:
    """Measure schedules that are known, and weigh those of other sizes, by what they hold."""
    known = list(known)
    footprints = [each for each in known if isinstance(each, Footprint)]
    measured = [each for each in known if isinstance(each, Schedule)]
    if any(leaves(op.name) for op in graph.ops):
        measured += [each.schedule for each in footprints]
        footprints = []
    weighed = weigh_options(
        graph,
        footprints,
        [value.size_bytes for value in graph.values],
        [op.workspace_bytes for op in graph.ops],
        [op.time for op in graph.ops],
    )
    return [*weighed, *(measure_option(graph, each) for each in measured)]


def _empty_front(graph: Graph, wiring: Wiring, least_kept_bytes: int) -> RegionFront:
    """Bound each half by what its ops need one by one, and the second by what was kept for it."""
    need = while_running(wiring)
    middle = graph.boundary_index
    between, sizes = graph.ops[middle], graph.value_by_name
    let_go = set(between.inputs) - graph.results - graph.resident
    kept = max(0, least_kept_bytes - sum(sizes[value].size_bytes for value in let_go))
    after = kept + incoming_bytes(graph) if middle + 1 < len(graph.ops) else 0
    return RegionFront(
        graph=graph,
        options=(),
        bounds=(),
        least_kept_bytes=least_kept_bytes,
        least_forward_bytes=int(need[:middle].max(initial=0)),
        least_backward_bytes=max(after, int(need[middle + 1 :].max(initial=0))),
    )


def _with_workspace(graph: Graph, workspace_bytes: int) -> Graph:
    """Give the op at the boundary another workspace."""
    op = dataclasses.replace(boundary_op(graph), workspace_bytes=workspace_bytes)
    middle = graph.boundary_index
    return dataclasses.replace(graph, ops=(*graph.ops[:middle], op, *graph.ops[middle + 1 :]))


def _is_closed(front: RegionFront, kept_bytes: int, peak_bytes: int) -> bool:
    """Say whether a solve within the box could show no more than is known."""
    bound = front.bound(kept_bytes, peak_bytes)
    best = front.best(kept_bytes, peak_bytes)
    return bound == math.inf or (best is not None and best.time <= bound * (1 + _CLOSE))


def _start(front: RegionFront, kept_bytes: int, peak_bytes: int) -> Schedule:
    """Choose where to begin: the fastest that fits, else what is over the limits by least."""
    best = front.best(kept_bytes, peak_bytes)
    if best is not None:
        return best.schedule

    def over(option: RegionOption) -> int:
        beyond = max(0, option.kept_bytes - kept_bytes)
        return beyond + max(0, option.peak_bytes - peak_bytes)

    return min(front.options, key=over).schedule


def _spread(least: int, most: int, points: int) -> list[int]:
    """Spread evenly, both ends included, each once."""
    return sorted({least + (most - least) * i // (points - 1) for i in range(points)})
