"""By which option the next call of a region runs, and which calls give memory back for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from remat.session.calls import Call
from remat.session.kinds import RegionPlan
from remat.session.known_patterns import KnownPatterns
from remat.session.step_planner import StepPlanner
from remat_solvers.step import RegionOption

__all__ = ["CallOptions"]


@dataclass(eq=False)
class CallOptions:
    """Options of calls: as planned where the pattern of calls is known, else by the room left."""

    planner: StepPlanner
    patterns: KnownPatterns

    def next(
        self, calls: tuple[int, ...], plan: RegionPlan, open_calls: Sequence[Call]
    ) -> RegionOption:
        """Find the option of the call after these: planned, or that of other sizes, if it fits."""
        planned = self.patterns.option_for(calls, plan.kind)
        if planned is not None:
            return planned
        kinds = self.planner.kinds
        families, kind = tuple(kinds[number].family for number in calls), kinds[plan.kind]
        alike = self.patterns.option_alike(families, kind.family)
        if alike is not None:
            option = kind.by(alike)
            if option.peak_bytes <= self._room_left(open_calls):
                return option
        return self._unplanned(plan, open_calls)

    def _room_left(self, open_calls: Iterable[Call]) -> int:
        """Give what the open calls, and the code between regions, leave of what a step may take.

        That code is taken to hold the most that it held at any time of a recorded step.
        """
        room = self.planner.room or self.planner.budget()
        held = self.patterns.held("backward") if self.patterns.known else 0
        return room - held - sum(call.kept_bytes for call in open_calls)

    def _unplanned(self, plan: RegionPlan, open_calls: Iterable[Call]) -> RegionOption:
        """Find the option that keeps the least of those whose halves fit beside the open calls."""
        if self.planner.is_unknown:
            return plan.lean
        left = self._room_left(open_calls)
        options = self.planner.kinds[plan.kind].front.options
        fitting = [option for option in options if option.peak_bytes <= left]
        if fitting:
            return min(fitting, key=lambda option: option.kept_bytes)
        return min(options, key=lambda option: option.peak_bytes)

    def make_room(
        self, open_calls: Iterable[Call], needed: int, half: str, own: Call | None = None
    ) -> Iterator[Call]:
        """Let earlier calls give back what they can make again, the largest first; give each.

        What the code between regions holds is taken to be the most that it held at any time in
        this half of the steps that were recorded. Nothing is given back in a step that is planned.
        """
        if not self.patterns.off_plan or self.planner.room is None:
            return
        calls = sorted(open_calls, key=lambda call: -call.droppable_bytes)
        held = sum(call.kept_bytes for call in calls if call is not own)
        room = self.planner.room - self.patterns.held(half) - needed
        for call in calls:
            if held <= room:
                break
            if call is not own and call.droppable_bytes > 0:
                held -= call.droppable_bytes
                call.go_lean()
                yield call
