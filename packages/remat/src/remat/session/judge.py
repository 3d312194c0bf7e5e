"""Holds recorded steps of several regions against the budget, and plans by them.

A step without a plan is planned; one that went over gets a warning, and is planned anew. A
provisional record is planned by, with a warning, but alone it refuses nothing: later steps may take
less, and the first that is recorded says so. After several in a row that are over the budget and
for which no plan fits, the next step is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from remat.budgets.blocks import or_with_expandable_segments
from remat.budgets.plain import has_room_for_plain
from remat.errors import BudgetWarning
from remat.planning.ranks import has_other_ranks
from remat.planning.settings import Settings
from remat.planning.user_plan import UserPlan
from remat.plans.origin import Origin
from remat.session import verdicts
from remat.session.calls import Call
from remat.session.deferring import OutputUses
from remat.session.planned_patterns import PlannedPattern, PlannedPatterns
from remat.session.recording import Recorded
from remat.session.region import forget_last, is_unrehearsed, keep
from remat.session.shown import SeenLoss
from remat.session.step_planner import StepPlanner
from remat_exec import BudgetExceeded
from remat_graph.torch import Mark
from remat_solvers import BudgetTooSmall

__all__ = ["Judge"]

_ATTEMPTS = 4  # steps in a row that may go over the budget, each by another plan or by none; and
# that may run plain without coming to an end, or be planned in where nothing else can be known

_MARKS_OF_CALL = ["start", "forward 0", "kept 0", "backward 0", "end"]


@dataclass(eq=False)
class Judge:
    """Plans for recorded steps, and keeps what was planned in `patterns`.

    `on_plan` is given each plan. `user_plan` is still to be followed. Where no plan fits, `outputs`
    are watched first. A step that `awaits_plain` is planned by when it is known what a fraction is
    of: the next one runs plain, and is measured.
    """

    settings: Settings
    on_plan: Callable[[Any], None]
    planner: StepPlanner
    patterns: PlannedPatterns
    outputs: OutputUses
    user_plan: UserPlan | None
    _error: Exception | None = None
    _step: int = 0
    _over_in_a_row: int = 0
    _reading_in_a_row: int = 0
    _awaiting: tuple[Recorded, int] | None = None
    _plain_attempts: int = 0
    _is_early: bool = False
    _call_was_over: bool = False

    def see_call(self, call: Call, marks: Sequence[Mark]) -> None:
        """See whether the first step by the plan of one region stayed within the budget.

        What the code between forward and backward takes, most often a loss, is in no graph: a plan
        allows it so much, measured or guessed. More is planned for from then on.

        Warns:
            BudgetWarning: if it took more.
        """
        region, planned = call.region, call.planned
        if planned is None or call.missing != planned.capture.missing:
            return  # a backward that was not planned for; the next plan is
        if [mark.label for mark in marks] != _MARKS_OF_CALL:
            return
        budget, device = planned.plan.budget_bytes, planned.capture.program.device
        most = max(mark.peak_bytes for mark in marks)
        if call.was_read and planned.capture.program.deferred:
            if most > budget and not call.warned:  # what reads now and then is not planned for
                self._tell_of_reading(most, budget)
            return
        seen, allowed = call.loss_seen(planned, marks), planned.capture.loss
        expected = seen.at_least(allowed)
        over = expected != allowed and (
            marks[-2].peak_bytes > budget
            or (most > budget and expected.kept_bytes > allowed.kept_bytes)
        )
        if expected != allowed:
            loss = SeenLoss.seen(expected, planned.capture)
            region.see_loss(loss, planned.plan if over else None)
        if over:
            why = verdicts.LOSS_OVER.format(
                seen.kept_bytes + seen.workspace_bytes,
                allowed.kept_bytes + allowed.workspace_bytes,
            )
        elif most > budget and is_unrehearsed(planned):
            region.rehearse_all_sizes()
            why = verdicts.SIZES_OVER
        elif most > budget:
            if not self._call_was_over:  # what an optimizer keeps is new but once
                self._call_was_over = True
                return
            why = (
                f"something that no plan knows of takes memory in it, such as hooks of parameters"
                f"{verdicts.OTHER_BLOCKS * (device.type == 'cuda')}. "
                f"Its gradients are right; ask for so much less"
                f"{or_with_expandable_segments(device)}"
            )
        keep(region.checked, call.numbers, planned.plan)
        if most > budget:
            more = f"{most - budget:,} more than the budget of {budget:,}"
            warnings.warn(f"a step took {most:,} bytes, {more}: {why}", BudgetWarning, stacklevel=2)

    def _tell_of_reading(self, most: int, budget: int) -> None:
        more = f"{most - budget:,} more than the budget of {budget:,}"
        text = f"a step took {most:,} bytes, {more}: {verdicts.READ}"
        warnings.warn(text, BudgetWarning, stacklevel=3)

    def refuse(self) -> None:
        """Raise what ended the planning, if something did.

        Each time anew, without a traceback: that would keep the frames of the caller, and what they
        hold, as long as the model.
        """
        if self._error is not None:
            error = self._error
            raised = type(error).__new__(type(error), *error.args)
            vars(raised).update(vars(error))
            self._error = error.with_traceback(None)
            self._error.__context__ = self._error.__cause__ = None
            raise raised

    @property
    def is_refused(self) -> bool:
        """Whether something ended the planning."""
        return self._error is not None

    def forget_refusal(self) -> Exception | None:
        """Let planning go on, and give what ended it."""
        error, self._error = self._error, None
        return error

    @property
    def awaits_plain(self) -> bool:
        """Whether the next step is to run plain."""
        return self._awaiting is not None

    def see_plain(self, measured: tuple[int, int] | None, device: torch.device) -> None:
        """Plan by the step before one that ran plain: its peak, and what its regions keep.

        Of one that was not recorded to its end nothing is known.
        """
        waiting, self._awaiting = self._awaiting, None
        self._plain_attempts += 1
        if waiting is not None and measured is not None:
            self.planner.plain.know(*measured, "measured")
            self._is_early = True
            self.take(waiting[0], None, waiting[1], device)
            self._is_early = False
            if waiting[0].provisional:  # its calls may be planned anew since
                self.planner.forget_need(waiting[0].pattern)

    def _knows_plain(self, record: Recorded, device: torch.device) -> bool:
        """Have the next step run plain; predict its peak where it would not fit, or none ended."""
        stored = self.planner.stored_peak(record)
        can_run = self.settings.costs == "measure" and has_room_for_plain(stored, device)
        if can_run and self._plain_attempts < _ATTEMPTS:
            self._awaiting = record, self._step
            return False
        if record.provisional and self._step < _ATTEMPTS:  # what is made but once counts in it
            return False
        self.planner.plain.know(stored, self.planner.stored_bytes(record.pattern), "predicted")
        return True

    def take(
        self, record: Recorded, ran_by: PlannedPattern | None, step: int, device: torch.device
    ) -> None:
        """See that a recorded step took no more than the budget; plan by it, if it is new.

        `ran_by` is what was known of its calls, if they ran by a plan; `step` is its number.
        """
        self._step, origin = step, Origin.here(device)
        self.patterns.recorded()
        if self.planner.is_unknown and not self._knows_plain(record, device):
            return
        self.planner.see(record)
        planned = self.patterns.of(record.pattern) or ran_by
        if planned is not None and self._was_over_by_reading(record, planned):
            return
        if ran_by is not None:
            if self._is_doubtful(record, ran_by):
                return
            most = max(record.peak_bytes, ran_by.plan.measured_peak_bytes or 0)
            ran_by.plan = replace(ran_by.plan, measured_peak_bytes=most)
            # Where there are other ranks, messages come sooner or later from step to step.
            if not record.provisional and not has_other_ranks():
                ran_by.awaited = 0
            if ran_by.fits:
                if record.peak_bytes <= ran_by.plan.budget_bytes:
                    ran_by.see_held(record)
                self.on_plan(ran_by.plan)
        try:
            new_pattern = self._plan_by(record, planned, origin, by_plan=ran_by is not None)
        except (BudgetTooSmall, BudgetExceeded) as error:
            if self._goes_on(record, error):
                return
            if isinstance(error, BudgetTooSmall):
                self.planner.note_slices(error)
            if self.settings.on_infeasible == "raise":
                peak, budget = record.peak_bytes, error.budget_bytes
                if isinstance(error, BudgetTooSmall) and peak > budget and not self._is_early:
                    error.add_note(self._over(peak, budget, verdicts.REFUSED))
                self._error = error
                return
            new_pattern = self.planner.without_plan(_wanted(record, planned), error, origin)
        except Exception as error:
            self._error = error
            return
        if new_pattern is not None:
            self.patterns.add(new_pattern)
            if new_pattern.fits:
                self.on_plan(new_pattern.plan)

    def _was_over_by_reading(self, record: Recorded, planned: PlannedPattern) -> bool:
        """Tell of a step over the budget that read an output: what is read now and then.

        That is not planned for, unless each of several steps in a row does so.
        """
        peak, budget = record.peak_bytes, planned.plan.budget_bytes
        if not (record.was_read and planned.fits and peak > budget):
            self._reading_in_a_row = 0
            return False
        self._reading_in_a_row += 1
        if self._reading_in_a_row == _ATTEMPTS:
            self._reading_in_a_row = 0
            return False
        warnings.warn(self._over(peak, budget, verdicts.READ), BudgetWarning, stacklevel=2)
        return True

    def _goes_on(self, record: Recorded, error: BudgetTooSmall | BudgetExceeded) -> bool:
        """Whether steps go on though one had no plan: later ones make or read less outputs."""
        if self.outputs.begin_watching(error):
            self._over_in_a_row, reason = 0, verdicts.WITHOUT
        elif forget_last(self.outputs.regions, error):
            reason, self.patterns.record_next = verdicts.FORGOTTEN, True
        elif record.was_read and self._over_in_a_row + 1 < _ATTEMPTS:
            self._over_in_a_row, reason = self._over_in_a_row + 1, verdicts.READ
            self.patterns.record_next = True
        else:
            return False
        if record.peak_bytes > error.budget_bytes:
            self._tell_over(record.peak_bytes, error.budget_bytes, reason)
        return True

    def see_part(self, at_least: int, step: int, pattern: Sequence[int]) -> bool:
        """Tell of a step over the budget that was recorded in part; the next one is recorded whole.

        What it had before was not seen to be let go of, so that it took so much at least. With
        other ranks that does not follow: what their messages leave is not seen to be let go of.
        A fraction may not be known yet.
        """
        if self.planner.is_unknown or has_other_ranks():
            return False
        self._step = step
        budget = self.planner.budget(pattern)
        if at_least > budget:
            text = self._over(at_least, budget, verdicts.IN_PART)
            warnings.warn(f"{text}, and {verdicts.NEXT}", BudgetWarning, stacklevel=2)
        return at_least > budget

    def see_lone(self, peak_bytes: int, budget: int, step: int) -> None:
        """Tell of a step over the budget that had one call, where several were expected.

        It is not planned for by its record: steps of one call have plans of their own.
        """
        self._step = step
        self._tell_if_over(peak_bytes, budget, verdicts.OTHERS_EXPECTED)

    def see_refused(self, record: Recorded) -> None:
        """Tell of a step over the budget which others like it are refused for."""
        self._tell_if_over(record.peak_bytes, self.planner.budget(record.pattern), verdicts.REFUSED)

    def known_budget(self, pattern: Sequence[int] = ()) -> int | None:
        """Give the budget of a step of these calls, if it is known, and there is a plan to keep."""
        unknown = self.planner.is_unknown or (
            self.settings.budget.is_auto and not self.patterns.planned
        )
        return None if unknown or self.patterns.runs_plain else self.planner.budget(pattern)

    def warn_unrecorded(self, at_least: int, step: int, pattern: Sequence[int]) -> None:
        """Tell of a step that is known to be over the budget though it was not recorded."""
        budget = self.known_budget(pattern)
        if budget is not None:
            self._step = step
            self._tell_if_over(at_least, budget, verdicts.BY_CALLS)

    def _plan_by(
        self, record: Recorded, planned: PlannedPattern | None, origin: Origin, *, by_plan: bool
    ) -> PlannedPattern | None:
        """Plan by a recorded step; `None` if what was planned serves, or a later step is to say.

        Raises:
            BudgetTooSmall: if nothing fits.
            BudgetExceeded: if the steps of several plans in a row were over the budget.
        """
        planner, peak = self.planner, record.peak_bytes
        user_plan = self.user_plan
        if not record.provisional:
            self.user_plan = None
        again, over = False, 0
        families, budget = planner.families(record.pattern), planner.budget(record.pattern)
        if planned is None and not user_plan and self.patterns.serve(record, families, budget):
            self._over_in_a_row = 0
            return None
        if planned is not None:
            same = record.pattern == planned.record.pattern
            again = same and (record.provisional or planned.record.provisional)
            over = peak - planned.plan.budget_bytes
            if over <= 0 or not planned.fits:
                self._over_in_a_row = 0
                if record.provisional or not again or planner.serves(planned, record):
                    return None
            elif record.provisional and not same:
                self._tell_over(peak, planned.plan.budget_bytes, verdicts.AT_FIRST)
                return None
            else:
                self._over_in_a_row += 1
                if not again:
                    planner.set_aside += over + over // 4
        wanted = _wanted(record, planned)
        try:
            new_pattern = planner.follow(wanted, user_plan, origin) if user_plan else None
            new_pattern = new_pattern or planner.plan(wanted, origin)
        except BudgetTooSmall as error:
            if record.provisional and peak > error.budget_bytes:
                self._over_in_a_row += planned is None
                if self._over_in_a_row < _ATTEMPTS:
                    reason = verdicts.UNFITTING.format(error.smallest_bytes)
                    self._tell_over(peak, error.budget_bytes, reason)
                    return None
            elif record.provisional or (again and over <= 0):
                return None
            raise
        if peak <= new_pattern.plan.budget_bytes:
            self._over_in_a_row = 0
        else:
            aside = f", with {planner.set_aside:,} bytes set aside" if planner.set_aside else ""
            reason = verdicts.BY_PLAN if by_plan else verdicts.OFF_PLAN
            then = f"the next step is planned anew{aside}"
            self._tell_over(peak, new_pattern.plan.budget_bytes, reason, then)
        return new_pattern

    def _is_doubtful(self, record: Recorded, ran_by: PlannedPattern) -> bool:
        """Whether a step may have been within the budget though its record says more.

        What a thread of the process group lets go of, a message, is not seen to be: it counts as
        held to the end. A step is not judged by that, unless it is the last that is recorded.
        """
        over = record.peak_bytes - ran_by.plan.budget_bytes
        unseen = record.left_bytes - ran_by.left_bytes
        ran_by.left_bytes = min(ran_by.left_bytes, record.left_bytes)
        return has_other_ranks() and 0 < over <= unseen and ran_by.awaited > 0

    def _tell_over(self, peak: int, budget: int, reason: str, then: str = verdicts.NEXT) -> None:
        """Warn of a step over the budget, but not of one before it was known.

        Raises:
            BudgetExceeded: after the steps of several plans in a row.
        """
        if self._is_early:
            return
        text = self._over(peak, budget, reason)
        if self._over_in_a_row >= _ATTEMPTS:
            text += f"; so did the {_ATTEMPTS - 1} that were recorded before it; raise the budget"
            raise BudgetExceeded(text, budget, peak)
        warnings.warn(f"{text}, and {then}", BudgetWarning, stacklevel=2)

    def _tell_if_over(self, peak: int, budget: int, reason: str) -> None:
        if peak > budget:
            warnings.warn(self._over(peak, budget, reason), BudgetWarning, stacklevel=3)

    def _over(self, peak: int, budget: int, reason: str) -> str:
        return (
            f"step {self._step} took {peak:,} bytes, {peak - budget:,} more than the budget of "
            f"{budget:,}: {reason}. Its gradients are right"
        )


def _wanted(record: Recorded, planned: PlannedPattern | None) -> Recorded:
    """Plan for a known pattern again where a step made a part of its calls."""
    if planned is not None and record.pattern != planned.record.pattern:
        return planned.record
    return record
