"""The patterns of calls that steps were planned for, and which of them a step follows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from remat.planning.ranks import has_other_ranks
from remat.plans.plan import Plan
from remat.plans.regions import peak_of
from remat.session.recording import Recorded, is_part
from remat_solvers.step import RegionOption

__all__ = ["PlannedPattern", "PlannedPatterns"]

_MOST = 8
_SIZES = 3  # of the same operations that are planned for
_FOR_GOOD = 3  # steps off plan in a row, after which a known pattern gives way to theirs
_PATIENCE = 8  # steps recorded in the hope of one that has no plan, or runs by one not measured


@dataclass(eq=False)
class PlannedPattern:
    """A pattern of calls that was planned for: the option of each, and what others held at most.

    `families` are those of the kinds of its calls: of the same operations, and of any sizes.
    `stored` are the bytes that each call keeps if it stores everything, by which sizes compare, and
    `handed_bytes` those of the outputs of all calls.
    `fits` says that the plan is within the budget; one that is not runs as storing everything does.
    `awaited` is for how many more steps one that runs by this plan is waited for, to be measured;
    where there are other ranks, for how many more steps it is recorded. `left_bytes` is the least
    that a step of it left behind. `next` is the pattern that came after it when it was last seen.
    """

    record: Recorded
    plan: Plan
    options: tuple[RegionOption, ...]
    held: dict[str, int]
    families: tuple[int, ...]
    stored: tuple[int, ...] = ()
    handed_bytes: int = 0
    fits: bool = True
    awaited: int = _PATIENCE
    next: PlannedPattern | None = None
    left_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """See what the recorded step left behind."""
        self.left_bytes = self.record.left_bytes

    def peak_with(self, options: Sequence[RegionOption], stored: Sequence[int]) -> int:
        """Bound what a step takes whose first calls run by options of other sizes.

        They would keep so much each if all were `stored`.
        """
        own = self.options[: len(options)]
        beyond = sum(_beyond(new, old) for new, old in zip(options, own, strict=True))
        held = max(self.held, key=self.held.__getitem__, default=None)
        grown = 0 if held is None else self.held_with(held, stored) - self.held[held]
        peak = max(self.plan.predicted_peak_bytes, self.plan.measured_peak_bytes or 0)
        return peak + beyond + grown

    def peak_with_more(self, call: int, more_bytes: int) -> int:
        """Predict the peak where the backward of a call takes so much beyond the call's peak."""
        taken, others = self.options[call], list(self.options)
        others[call] = replace(taken, backward_bytes=taken.peak_bytes + more_bytes)
        return peak_of(self.record.moments, others)

    def peak_with_held(self, call: int, own_bytes: int, others_bytes: int) -> int:
        """Predict the peak from a call's forward to its backward if more outputs are held.

        So many bytes of its own, at any time of that; and of others in its backward.
        """
        waiting, backward = self._peaks.get(call, (0, 0))
        beyond = max(0, (self.plan.measured_peak_bytes or 0) - self._predicted_peak_bytes)
        beyond += self.plan.set_aside_bytes
        return beyond + max(waiting + own_bytes, backward + own_bytes + others_bytes)

    @functools.cached_property
    def _predicted_peak_bytes(self) -> int:
        return self.plan.predicted_peak_bytes

    @functools.cached_property
    def _peaks(self) -> dict[int, tuple[int, int]]:
        """The peaks while code runs between the halves of each call, and in its backward."""
        peaks: dict[int, tuple[int, int]] = {}
        for moment in self.plan.moments:
            peak = peak_of([moment], self.options)
            if moment.running is None:
                for call, _ in moment.live:
                    waiting, backward = peaks.get(call, (0, 0))
                    peaks[call] = max(waiting, peak), backward
            elif moment.running[1] == "backward":
                waiting, backward = peaks.get(moment.running[0], (0, 0))
                peaks[moment.running[0]] = waiting, max(backward, peak)
        return peaks

    def see_held(self, record: Recorded) -> None:
        """See which outputs a step by this plan held, that was within the budget."""
        if record.pattern == self.record.pattern and self.record.held_on:
            pairs = zip(self.record.held_on, record.held_on, strict=True)
            held_on = tuple((max(a[0], b[0]), max(a[1], b[1])) for a, b in pairs)
            self.record = replace(self.record, held_on=held_on)

    def held_with(self, half: str, stored: Sequence[int]) -> int:
        """Bound what the code between regions holds where the first calls are of other sizes.

        It grows as the call does that grows most, but by no more bytes than all calls together
        would if everything were stored, or in proportion to these. Outputs that it lets go of count
        as kept by the calls, so that what it holds is less by so much, and grows as if it were not.
        """
        held, own = self.held[half], self.held[half] + self.handed_bytes
        pairs = zip(stored, self.stored, strict=False)
        more = [(max(0, new - old), max(1, old)) for new, old in pairs]
        grows = max((-(-own * each // old) for each, old in more), default=0)
        together, of_old = sum(each for each, _ in more), max(1, sum(old for _, old in more))
        return held + min(grows, max(together, -(-own * together // of_old)))


@dataclass(eq=False)
class PlannedPatterns:
    """The patterns, in the order in which it was last seen; and what the step under way follows.

    `off_plan` says that the calls of this step are part of no pattern here, or that the
    first of them ran by the options of another. `record_next` asks for a recording in any case. The
    last calls off plan are `missing`; if they were so twice, `missing_for` more steps are recorded.
    """

    planned: list[PlannedPattern] = field(default_factory=list)
    off_plan: bool = False
    record_next: bool = False
    _followed: PlannedPattern | None = None
    _off_in_a_row: int = 0
    _wanted: bool = True
    _missing: tuple[int, ...] = ()
    _missing_for: int = 0

    @property
    def wanted(self) -> bool:
        """Whether the next step is to be recorded."""
        awaited = any(each.awaited for each in self.planned)
        return self._wanted or self.record_next or awaited or self._missing_for > 0

    @property
    def runs_plain(self) -> bool:
        """Whether the step follows a pattern without a plan, of which a warning was given."""
        return self._followed is not None and not self._followed.fits

    @property
    def plan(self) -> Plan | None:
        """The plan of the pattern that the step follows, if it is within the budget."""
        return self._followed.plan if self._followed is not None and self._followed.fits else None

    def peak_with_more(self, call: int, more_bytes: int) -> int:
        """Predict the same of the step under way, which follows a plan."""
        followed = self._followed
        assert followed is not None
        if call >= len(followed.options):
            return followed.plan.predicted_peak_bytes + more_bytes
        return followed.peak_with_more(call, more_bytes)

    def peak_with_held(self, pattern: tuple[int, ...], call: int, held: tuple[int, int]) -> int:
        """Predict the same where the backward of a call begins while outputs are `held`, in bytes.

        They are its own, and those of calls whose backward is over. It is 0 if no more is held than
        when the step was planned, or if other calls were planned for.
        """
        followed = self._followed
        if followed is None or followed.record.pattern[: len(pattern)] != pattern:
            return 0
        before = followed.record.held_on[call] if followed.record.held_on else held
        own, others = (max(0, now - then) for now, then in zip(held, before, strict=True))
        return followed.peak_with_held(call, own, others) if own or others else 0

    def option_for(self, so_far: tuple[int, ...], kind: int) -> RegionOption | None:
        """Find the option for the next call, in a pattern that is known or part of one that is."""
        others = [each for each in reversed(self.planned) if each is not self._followed]
        others.sort(key=lambda each: not each.fits)
        for each in (*([self._followed] if self._followed else []), *others):
            at = _position(each.record.pattern, so_far, kind)
            if at is not None:
                self.off_plan |= each is not self._followed and bool(so_far)
                self._followed = each
                return each.options[at]
        self.off_plan = bool(self.planned)
        return None

    def option_alike(self, so_far: tuple[int, ...], family: int) -> RegionOption | None:
        """Find the option of a call like the next one, of the family, in a pattern of such calls.

        Of those that are known the one that keeps the most, planned for the largest sizes.
        """
        options = [
            each.options[at]
            for each in self.planned
            if each.fits and (at := _position(each.families, so_far, family)) is not None
        ]
        return max(options, key=lambda option: option.kept_bytes, default=None)

    def peak_alike(
        self, families: tuple[int, ...], options: Sequence[RegionOption], stored: Sequence[int]
    ) -> int | None:
        """Bound what a step takes whose calls so far are of these families, options and sizes.

        That is what a planned step of such calls takes, whatever their sizes, and for each call
        what it takes beyond the one there; what is held beside grows with what the calls would keep
        if all were `stored`. `None` if there is no such step.
        """
        return min(
            (each.peak_with(options, stored) for each in self._alike(families)), default=None
        )

    def fastest_fitting(
        self,
        families: tuple[int, ...],
        so_far: Sequence[RegionOption],
        stored: Sequence[int],
        options: Sequence[RegionOption],
        room: int,
    ) -> RegionOption | None:
        """Find the fastest option of the call after these by which the bound is within the room.

        The families and sizes are those of that call, too. `None` if there is none.
        """
        at = len(so_far)
        before = [(e.peak_with(so_far, stored), e.options[at]) for e in self._alike(families)]
        by_time = sorted(options, key=lambda option: option.time)
        fits = (o for o in by_time if any(peak + _beyond(o, own) <= room for peak, own in before))
        return next(fits, None)

    def _alike(self, families: tuple[int, ...]) -> list[PlannedPattern]:
        """List those within the budget whose first calls are of these families."""
        return [e for e in self.planned if e.fits and e.families[: len(families)] == families]

    def end_step(self, pattern: tuple[int, ...]) -> PlannedPattern | None:
        """End a step of these calls; give the pattern by whose plan it ran, if there is one.

        The step after it is expected to follow what came after that pattern before.
        """
        seen = self._followed
        if seen is not None and not seen.fits and pattern != seen.record.pattern:
            self.off_plan = True  # a part of what does not fit may fit
        ran_by = None if self.off_plan else seen
        self._off_in_a_row = self._off_in_a_row + 1 if self.off_plan else 0
        self._wanted = not self.planned or (
            self.off_plan and (len(self.planned) < _MOST or self._off_in_a_row >= _FOR_GOOD)
        )
        if self.off_plan and len(self.planned) < _MOST:
            self._missing_for = _PATIENCE * (pattern == self._missing)
            self._missing = pattern
        if seen is not None:
            self.planned[-1].next = seen
            self.planned.remove(seen)
            self.planned.append(seen)
            self._followed = seen.next if seen.next in self.planned else seen
        if ran_by is not None and ran_by.plan.measured_peak_bytes is None:
            ran_by.awaited = _PATIENCE
        self.off_plan = False
        return ran_by

    def of(self, pattern: tuple[int, ...]) -> PlannedPattern | None:
        """Find what is known of exactly these calls."""
        return next((each for each in self.planned if each.record.pattern == pattern), None)

    def serve(self, record: Recorded, families: tuple[int, ...], budget: int) -> bool:
        """Whether a recorded step needs no plan: it was within the budget by those of other sizes.

        That is, by the options of calls alike, once some sizes of these have plans. With other
        ranks, which may wait for what the first chooses, as many have one as are kept.
        """
        alike = [each for each in self.planned if each.fits and each.families == families]
        if has_other_ranks() and len(alike) < _MOST:
            return False
        return len(alike) >= _SIZES and not record.provisional and record.peak_bytes <= budget

    def exchange(self, planned: list[PlannedPattern]) -> list[PlannedPattern]:
        """Have other patterns than these, and give these."""
        before, self.planned = self.planned, planned
        self._followed, self._wanted = None, not planned
        return before

    def recorded(self) -> None:
        """Note that a step was recorded: plans that are not measured were waited for."""
        self.record_next = False
        self._missing_for = max(0, self._missing_for - 1)
        for each in self.planned:
            each.awaited = max(0, each.awaited - 1)

    def add(self, new: PlannedPattern) -> None:
        """Add what was planned last.

        What is part of it goes, and what no step ran by that was planned by a provisional record;
        then what was not seen longest.
        """
        pattern = new.record.pattern
        if pattern == self._missing:
            self._missing_for = 0
        kept = [
            each
            for each in self.planned
            if (each.plan.measured_peak_bytes is not None or not each.record.provisional)
            and (
                not is_part(each.record.pattern, pattern)
                or (not new.fits and each.record.pattern != pattern)
            )
        ]
        self.planned = [*kept[1 - _MOST :], new]
        self._followed = new

    def held(self, half: str, families: tuple[int, ...], stored: Sequence[int]) -> int:
        """Bound what the code between regions holds at any time in this half of a step.

        Its calls so far are of these families and sizes; if no step of such was planned, it is the
        most of any.
        """
        alike = [each.held_with(half, stored) for each in self._alike(families)]
        return min(alike) if alike else max((e.held[half] for e in self.planned), default=0)


def _beyond(new: RegionOption, old: RegionOption) -> int:
    """Give what a call takes at most beyond another, at any time of a step."""
    return max(
        0,
        new.kept_bytes - old.kept_bytes,
        new.forward_bytes - old.forward_bytes,
        new.backward_bytes - old.backward_bytes,
    )


def _position(pattern: Sequence[int], so_far: tuple[int, ...], number: int) -> int | None:
    """Find where in a pattern the next call stands, after those so far, with some left out."""
    at = 0
    for earlier in (*so_far, number):
        try:
            at = pattern.index(earlier, at) + 1
        except ValueError:
            return None
    return at - 1
