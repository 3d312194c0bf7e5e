"""Plans for recorded steps of several regions: an option for every call, within one budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remat.budgets.auto import AutoBudget
from remat.budgets.plain_step import PlainStep
from remat.planning.certain_bound import without_state
from remat.planning.infeasible import warn_infeasible
from remat.planning.ranks import MOST_TIMES, has_other_ranks, of_first_rank
from remat.planning.settings import Settings
from remat.planning.slices import note_reach
from remat.planning.task import RunnablePlan
from remat.planning.user_plan import UserPlan
from remat.plans.origin import Origin
from remat.plans.regions import PlannedRegion
from remat.report.readable_plan import ReadablePlan
from remat.session.choosing import (
    CHOICE_SECONDS,
    WORTH_REFINING,
    choose_options,
    moments_of,
    peak_by,
)
from remat.session.kinds import CapturedRegion, RegionKind
from remat.session.near_kinds import Kinds
from remat.session.planned_patterns import PlannedPattern
from remat.session.recording import Recorded
from remat_exec import BudgetExceeded
from remat_graph import Status
from remat_solvers import BudgetTooSmall, store_all
from remat_solvers.step import (
    RegionOption,
    TimeStep,
    measure_option,
    step_bound,
)
from remat_solvers.toolkit import HIGHS, doubt_of

__all__ = ["StepPlanner"]

logger = logging.getLogger(__name__)

_NAMED = 1.02  # times what a step needs: a budget that is said to be enough
_TOLERANCE = 1.002  # of the budget, by which fixed parts may be off from step to step


@dataclass(eq=False)
class StepPlanner:
    """Plans for recorded steps, within the budget less what is set aside.

    `kinds` are those of regions that were met, to which others are added; `cuts` are outputs at
    which regions are cut, by name, and `breaks` are named with a plan. `room` is what a step may
    take, `None` before the first plan. `plain` is what a fraction is of. A refusal names the most
    that any pattern of calls was seen to need.
    """

    settings: Settings
    auto: AutoBudget
    on_plan: Callable[[Any], None]
    cuts: Mapping[str, frozenset[int]]
    kinds: Kinds = field(default_factory=Kinds)
    breaks: list[str] = field(default_factory=list)
    set_aside: int = 0
    room: int | None = None
    plain: PlainStep = field(default_factory=PlainStep)
    _needed: dict[tuple[int, ...], int] = field(default_factory=dict)
    _neediest: tuple[Recorded, Sequence[RegionKind]] | None = None

    def exchange_kinds(self, kinds: Kinds) -> Kinds:
        """Have other kinds than these, and give these."""
        before = self.kinds.exchange(kinds)
        self._needed.clear()
        self._neediest = None
        return before

    def know_plain(self, plans: Iterable[object]) -> None:
        """Take what a fraction is of from plans of calls that had the whole budget, if any had."""
        for each in plans:
            plain = each.plan.plain_peak_bytes if isinstance(each, RunnablePlan) else None
            if isinstance(each, RunnablePlan) and plain is not None:
                graph = each.capture.without_alternatives().graph
                kept = measure_option(graph, store_all(graph)).kept_bytes
                if plain > self.plain.peak_bytes:
                    self.plain.know(plain, kept, each.plan.plain_basis)

    @property
    def is_unknown(self) -> bool:
        """Whether the budget is a fraction of a peak that no step has shown yet."""
        return not self.plain.peak_bytes and self.settings.budget.fraction is not None

    @property
    def known_budget(self) -> int | None:
        """The budget, if it is known what it is of."""
        return None if self.is_unknown else self.budget()

    def budget(self, pattern: Sequence[int] = ()) -> int:
        """Give the budget in bytes; a fraction is of the most that plain steps take, of these too.

        `pattern` are the kinds of the calls of a step.
        """
        asked = self.auto.fix() if self.settings.budget.is_auto else self.settings.budget
        return asked.resolve(lambda: self.plain.with_(self.stored_bytes(pattern)))

    def see(self, record: Recorded) -> None:
        """Count a recorded step in what a fraction is of."""
        if self.settings.budget.fraction is not None:
            self.plain.see(self.stored_bytes(record.pattern), self.stored_peak(record))

    def stored_bytes(self, pattern: Sequence[int]) -> int:
        """Sum what calls of these kinds keep if they store everything, whatever gradients come."""
        kinds = (self.kinds[number] for number in pattern)
        return sum(kind.plain_bytes or kind.everything.kept_bytes for kind in kinds)

    def stored(self, pattern: Sequence[int]) -> tuple[int, ...]:
        """Give what each call of these kinds keeps if it stores everything."""
        return tuple(self.kinds[number].everything.kept_bytes for number in pattern)

    def families(self, pattern: Sequence[int]) -> tuple[int, ...]:
        """Name the families of calls of these kinds: of the same operations, and of any sizes."""
        return tuple(self.kinds[number].family for number in pattern)

    def stored_peak(self, record: Recorded) -> int:
        """Give the bytes that a recorded step would have taken with everything stored.

        What is made in slices, or not made, is whole then, and counts at least between the halves.
        """
        stored = self._peak(record, [kind.everything for kind in self._kinds_of(record)])
        pattern = record.pattern
        return stored + max(0, self.stored_bytes(pattern) - sum(self.stored(pattern)))

    def plan(self, record: Recorded, origin: Origin) -> PlannedPattern:
        """Plan for a step like the one that was recorded.

        Raises:
            BudgetTooSmall: if no plan of the regions is within the budget.
        """
        kinds = self._kinds_of(record)
        budget = self.budget(record.pattern)
        room = self.take_room(budget)
        try:
            options = self._choose(kinds, record, room, budget - self.set_aside)
        except BudgetTooSmall as error:
            # Other steps like it need more; and so may those with other calls that did not fit.
            self._needed[record.pattern] = own = self._named(error)
            needed = max(self._needed.values())
            self._neediest = (record, kinds) if own == needed else self._neediest
            raise self._refused(kinds, budget, needed) from None
        self.forget_need(record.pattern)
        if has_other_ranks():
            limit = _limit(record, room, budget - self.set_aside)
            options = self._shared(record, options, limit)
        return self._planned(record, options, budget, origin)

    def _choose(
        self, kinds: Sequence[RegionKind], record: Recorded, room: int, most: int
    ) -> list[RegionOption]:
        """Choose within the room; if nothing fits, within the `most` that a step like it took.

        Raises:
            BudgetTooSmall: if nothing fits.
        """
        try:
            return choose_options(kinds, record, room)
        except BudgetTooSmall as error:
            if not room < error.smallest_bytes <= _limit(record, room, most):
                raise
            return choose_options(kinds, record, most)

    def forget_need(self, pattern: tuple[int, ...]) -> None:
        """Name no more what steps of these calls need, which are planned anew."""
        self._needed.pop(pattern, None)

    def refusal(self, plan: object) -> BudgetTooSmall | None:
        """Refuse steps of calls that share the budget, if not even one by this plan fits."""
        if not isinstance(plan, CapturedRegion) or self.may_fit(plan):
            return None
        kind, budget = self.kinds[plan.kind], self.budget((plan.kind,))
        needed = min(option.peak_bytes for option in kind.front.options)
        refused = self._refused([kind], budget, int(needed * _NAMED) + 1)
        if kind.in_slices is not None:
            reach = min(option.peak_bytes for option in kind.in_slices.front.options)
            note_reach(refused, max(budget, int(reach * _NAMED) + 1))
        return refused

    def may_fit(self, plan: object) -> bool:
        """Whether a step may be within the budget: one call by this plan is, as far as is known."""
        if self.is_unknown or not isinstance(plan, CapturedRegion):
            return True
        options = self.kinds[plan.kind].options
        return min(option.peak_bytes for option in options) <= self.budget((plan.kind,))

    def _named(self, error: BudgetTooSmall) -> int:
        """Give the budget that is said to be enough where a step was refused."""
        return int(error.smallest_bytes * _NAMED) + 1 + self.set_aside

    def note_slices(self, refused: BudgetTooSmall) -> None:
        """Add to a refusal what the step that needs the most takes in slices.

        That is solved for now: a step after which others go on need not say so.
        """
        record, kinds = self._neediest or (None, ())
        if record is None or record.pattern not in self._needed:
            return
        sliced = [kind.in_slices or kind for kind in kinds]
        if sliced == kinds:
            return
        budget = self.budget(record.pattern)
        try:
            choose_options(sliced, record, self.take_room(budget))
        except BudgetTooSmall as error:
            note_reach(refused, self._named(error))
        else:
            note_reach(refused, budget)

    def _refused(self, kinds: Sequence[RegionKind], budget: int, needed: int) -> BudgetTooSmall:
        """Refuse steps of calls of these kinds, for which so much is needed."""
        least = max(kind.least_forward_bytes for kind in kinds)  # whatever was recorded
        least = without_state(least)
        status = Status.INFEASIBLE if least > budget else Status.LIMIT
        refused = BudgetTooSmall(budget, needed, least, None, status)
        if self.breaks:
            where = "\n".join(f"  {reason}" for reason in dict.fromkeys(self.breaks))
            refused.add_note(f"Only what is within a region is computed again, and:\n{where}")
        return refused

    def serves(self, planned: PlannedPattern, record: Recorded) -> bool:
        """Whether the plan by a provisional record is as good as one made by a later one."""
        budget = self.budget(record.pattern)
        before, now = (self._peak(one, planned.options) for one in (planned.record, record))
        is_close = abs(budget - planned.plan.budget_bytes) < (_TOLERANCE - 1) * budget
        return is_close and now > before - WORTH_REFINING * budget

    def follow(
        self, record: Recorded, user_plan: UserPlan, origin: Origin
    ) -> PlannedPattern | None:
        """Choose as the user's plan did; `None` if the calls differ, or it does not fit here."""
        kinds = self._kinds_of(record)
        differs = user_plan.difference(record.pattern, [kind.name for kind in kinds])
        if differs is not None:
            logger.warning("%s: the step is planned anew, by the schedules of the plan", differs)
            return None
        plan = user_plan.plan
        options = [kind.front.options[at] for kind, at in zip(kinds, plan.chosen, strict=True)]
        self.set_aside = max(self.set_aside, plan.set_aside_bytes)
        budget = self.budget(record.pattern)
        peak, room = self._peak(record, options), self.take_room(budget)
        if peak > _limit(record, room, budget - self.set_aside):
            logger.warning(
                "%s takes %s bytes here, where the code between the regions holds up to %s, and "
                "%s when it was made: over the budget of %s bytes, so the step is planned anew",
                user_plan.name, f"{peak + self.set_aside:,}", f"{_most_between(record.moments):,}",
                f"{_most_between(plan.moments):,}", f"{budget:,}",
            )  # fmt: skip
            return None
        return self._planned(record, options, budget, origin)

    def _shared(
        self, record: Recorded, options: list[RegionOption], limit: int
    ) -> list[RegionOption]:
        """Take what the rank that first planned such a step chose, if it is as good here."""
        numbers = list(dict.fromkeys(record.pattern))
        graphs = [self.kinds[number].front.graph for number in numbers]
        pattern = [numbers.index(number) for number in record.pattern]
        asked = f"{self.settings.budget} {pattern}"
        mine = list(zip(pattern, (option.schedule for option in options), strict=True))
        by_schedule = {
            (which, option.schedule): option
            for which, number in enumerate(numbers)
            for option in self.kinds[number].front.options
        }
        theirs = [
            by_schedule.get(choice) or measure_option(graphs[choice[0]], choice[1])
            for choice in of_first_rank(asked, graphs, mine)
        ]
        times = [sum(option.time for option in each) for each in (theirs, options)]
        fits = self._peak(record, theirs) <= limit and times[0] <= MOST_TIMES * times[1]
        return theirs if fits else options

    def _planned(
        self, record: Recorded, options: Sequence[RegionOption], budget: int, origin: Origin
    ) -> PlannedPattern:
        """Put together what is known of a plan within the budget, with a bound on all others.

        Nothing is proved by a provisional record: other steps may take less.
        """
        fronts = [self.kinds[number].front for number in record.pattern]
        bound = sum(front.graph.time for front in fronts)  # there are no alternatives
        if record.certain and not record.provisional:
            bound = step_bound(fronts, [1] * len(fronts), record.certain, budget,
                               limit_seconds=CHOICE_SECONDS)  # fmt: skip
        planned = self._pattern_by(record, options, budget, bound, origin)
        if logger.isEnabledFor(logging.INFO):  # a plan says what storing everything takes
            logger.info("planned: %s", str(planned.plan).replace("\n", "; "))
        return planned

    def without_plan(
        self, record: Recorded, error: BudgetTooSmall | BudgetExceeded, origin: Origin
    ) -> PlannedPattern:
        """Store everything in steps of this pattern, which cannot be within the budget."""
        options = [kind.everything for kind in self._kinds_of(record)]
        budget = self.budget(record.pattern)
        stored = self._pattern_by(record, options, budget, 0.0, origin)
        self.on_plan(warn_infeasible(f"a step of {len(options)} calls of regions", error))
        return replace(stored, fits=False, awaited=0)

    def _pattern_by(
        self,
        record: Recorded,
        options: Sequence[RegionOption],
        budget: int,
        bound: float,
        origin: Origin,
    ) -> PlannedPattern:
        """Put together what is known of a pattern whose calls run by these options."""
        numbers = list(dict.fromkeys(record.pattern))
        fronts = {number: self.kinds[number].front for number in numbers}
        for number, option in zip(record.pattern, options, strict=True):
            front = fronts[number]
            if option not in front.options:  # storing everything, say
                fronts[number] = replace(front, options=(*front.options, option))
        once = sum(self.kinds[number].time for number in record.pattern)
        kinds = [self.kinds[number] for number in record.pattern]
        of_others = any(kind.whole is not None for kind in kinds)
        least = sum(min(kind.time, kind.front.graph.time) for kind in kinds)
        plan = ReadablePlan(
            tuple((self.kinds[number].name, numbers.index(number)) for number in record.pattern),
            tuple(
                PlannedRegion(
                    fronts[n],
                    self.kinds[n].missing,
                    sliced=self.kinds[n].sliced,
                    deferred=self.kinds[n].deferred,
                    unfused=self.kinds[n].unfused,
                )
                for n in numbers
            ),
            tuple(
                fronts[number].options.index(option)
                for number, option in zip(record.pattern, options, strict=True)
            ),
            budget,
            # What is proved of a program in slices, or in groups, is not proved of others.
            min(least if of_others else max(bound, once), sum(option.time for option in options)),
            origin,
            moments_of(self._kinds_of(record), record, options),
            tuple(dict.fromkeys(self.breaks)),
            tuple(sorted(self.cuts.items())),
            self.set_aside,
            doubt=doubt_of(HIGHS),
            plain_peak_bytes=self.plain.peak_bytes or None,
            plain_basis=self.plain.basis,
            whole_time=once if of_others else None,
            earlier=self.kinds.outlines_beside(numbers),
        )
        forwards = (
            m.fixed_bytes for m in record.moments if m.running and m.running[1] == "forward"
        )
        held = {
            "forward": max(forwards, default=0),
            "backward": max(moment.fixed_bytes for moment in record.moments),
        }
        families = self.families(record.pattern)
        stored, handed = self.stored(record.pattern), sum(kind.incoming_bytes for kind in kinds)
        return PlannedPattern(record, plan, tuple(options), held, families, stored, handed)

    def take_room(self, budget: int) -> int:
        """Note what a step may take of a budget, and give it."""
        self.room = max(1, int((budget - self.set_aside) / _TOLERANCE))
        for kind in self.kinds:
            kind.room = self.room
        return self.room

    def _kinds_of(self, record: Recorded) -> list[RegionKind]:
        return [self.kinds[number] for number in record.pattern]

    def _peak(self, record: Recorded, options: Sequence[RegionOption]) -> int:
        return peak_by(self._kinds_of(record), record, options)


def _limit(record: Recorded, room: int, most: int) -> int:
    """Give what a plan by a record may take: `most`, if that step was measured within it."""
    return most if not record.provisional and record.peak_bytes <= most else room


def _most_between(moments: Sequence[TimeStep]) -> int:
    """Give the most that the code between the regions holds."""
    return max((moment.fixed_bytes for moment in moments), default=0)
