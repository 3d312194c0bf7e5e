"""What calls that share the budget take beside their plans: of that, steps are told at once.

Outputs are read that steps do not make, gradients come that earlier backwards did not give, or stay
that were to leave. Plans made later count them. The step under way may be over the budget, and most
steps are not recorded.
"""

from __future__ import annotations

import functools
import warnings
import weakref

from remat.errors import BudgetWarning
from remat.planning.ranks import has_other_ranks
from remat.planning.settings import Settings
from remat.session.calls import Call
from remat.session.region import Region
from remat.session.step import StepState
from remat_exec import Ability, abilities_of, get_executor

__all__ = ["Unplanned"]

_READ = (
    "an output that steps do not make was read before the backward, for which up to {:,} bytes are "
    "held that no plan counts, so that this step may take more than the budget of {:,}. Its "
    "gradients are right; read it after the backward, or name it in outputs="
)
_CAME = (
    "a backward gives gradients of outputs that earlier ones did not, for which up to {:,} bytes "
    "are held that no plan counts, so that this step may take more than the budget of {:,}. Its "
    "gradients are right"
)


_HELD = (
    "outputs of regions are held in the backward, {:,} bytes in all, more than in the step that "
    "was planned by, so that this step may take more than the budget of {:,}. Its gradients are "
    "right; let go of them before the backward, or hold them in the first steps"
)


class Unplanned:
    """Tells of what calls of the step under way take that is in no plan."""

    def __init__(self, step: StepState, settings: Settings) -> None:
        self._step, self._settings = step, settings
        self._told_of_staying: int | None = None
        self._told_of_holding: int | None = None

    @functools.cached_property
    def _knows_other_peaks(self) -> bool:
        executor = get_executor(self._settings.executor)
        return Ability.KNOWS_OTHER_PEAKS in abilities_of(executor)

    def see_read(self, ref: weakref.ref[Call], region: Region, position: int) -> None:
        """See that an output is read, and whether a step under way has room to make it.

        Warns:
            BudgetWarning: if it may have none.
        """
        step, call = self._step, ref()
        step.is_odd |= not region.see_read(position)
        if call is None or call not in step.live or position in call.outputs_watched:
            return
        step.outputs.was_read = True
        step.is_odd |= step.begun_late  # a record of a part does not show what was read
        call.reading_bytes += call.executable.reading_bytes(position)  # type: ignore[attr-defined]
        reading = sum(each.reading_bytes for each in step.open_calls)
        self._tell(call, _READ, reading)

    def see_gradients(self, call: Call, missing: frozenset[int]) -> None:
        """Learn which gradients come in a backward, and see whether there is room for them.

        Warns:
            BudgetWarning: if there may be none.
        """
        executable = call.executable
        self._step.is_odd |= not call.region.learn(executable, missing, None)
        if self._knows_other_peaks and not executable.capture.missing <= missing:
            peak: int = executable.peak_without(missing)  # type: ignore[attr-defined]
            self._tell(call, _CAME, max(0, peak - executable.peak_bytes), call.position)

    def see_held(self, call: Call, released_outputs: frozenset[int]) -> None:
        """See which outputs are held where a backward begins, and whether there is room for them.

        `released_outputs` are the positions of those of its own that nobody holds, or only the
        backward itself.

        Warns:
            BudgetWarning: if there may be none.
        """
        step, at, program = self._step, call.position, call.executable.capture.program
        names = [program.handed[position] for position in released_outputs]
        released = {program.storage[name] for name in names if name in program.storage}
        own = call.handed.held_bytes(released)
        step.handed_on = [handed for handed in step.handed_on if handed.held_bytes()]
        held = own, sum(handed.held_bytes() for handed in step.handed_on)
        if call.noted is not None:
            call.note_held(held, released)
        plan = None if step.patterns.off_plan else step.patterns.plan
        if plan is None or not any(held) or step.recording.is_running:
            return
        if self._told_of_holding == step.done:
            return
        if step.patterns.peak_with_held(step.pattern, at, held) > plan.budget_bytes:
            self._told_of_holding = step.done
            step.patterns.record_next |= not has_other_ranks()  # which would not plan with this one
            warnings.warn(_HELD.format(sum(held), plan.budget_bytes), BudgetWarning, stacklevel=3)

    def exceeded_if_staying(self) -> int | None:
        """Give the budget, once, if the step may have taken more where gradients stayed."""
        step = self._step
        if self._told_of_staying == step.done:
            return None
        self._told_of_staying = step.done
        return self._exceeded_with(sum(region.leaving_bytes for region, _ in step.calls))

    def _tell(self, call: Call, text: str, more_bytes: int, at: int | None = None) -> None:
        budget = None if call.warned else self._exceeded_with(more_bytes, at)
        if budget is not None:
            call.warned = True
            self._step.told_bytes += more_bytes
            warnings.warn(text.format(more_bytes, budget), BudgetWarning, stacklevel=3)

    def _exceeded_with(self, more_bytes: int, at: int | None = None) -> int | None:
        """Give the budget, if the step may take more with so much that is in no plan, or `None`.

        It may come at any time, or in the backward of the call `at` this position. A step that
        follows no plan is judged by its record, if it has one.
        """
        step, patterns = self._step, self._step.patterns
        plan = None if patterns.off_plan else patterns.plan
        if plan is None:
            is_judged = step.recording.is_running and not step.is_odd
            return None if is_judged else step.known_budget
        predicted = plan.predicted_peak_bytes
        peak = predicted + more_bytes if at is None else patterns.peak_with_more(at, more_bytes)
        peak += max(0, (plan.measured_peak_bytes or 0) - predicted)
        return plan.budget_bytes if peak > plan.budget_bytes else None
