"""Which outputs of a region its steps make: those that are named, or else those that were read.

Without names all are made at first, and watched. Those that no step has read by the time that its
backward begins are not made from then on; where no plan fits otherwise, none beside the loss is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from remat.planning.outputs import are_learned, not_named_of_region, with_named_outputs
from remat.planning.planner import RunnablePlan
from remat.planning.settings import Settings
from remat.session.region import Region
from remat_exec import Ability, BudgetExceeded, abilities_of, get_executor
from remat_graph.torch import Capture
from remat_solvers import BudgetTooSmall

__all__ = ["plan_outputs", "with_outputs"]


def plan_outputs(
    settings: Settings,
    region: Region,
    captured: Callable[[], Capture],
    plan: Callable[..., RunnablePlan],
) -> RunnablePlan:
    """Plan with all outputs made but those that steps did not read; without if none fits.

    `plan` plans with outputs as `with_outputs` says, of a call that is `captured` with all of them.

    Raises:
        BudgetTooSmall, BudgetExceeded: if none fits.
    """
    learned = _are_learned(settings)
    try:
        planned = plan(all_deferred=False)
    except (BudgetTooSmall, BudgetExceeded):
        if not learned or settings.region_plan is not None:
            raise
        if captured().deferrable <= (region.unread or frozenset()):
            raise
        planned = plan(all_deferred=True)
    if not learned:
        return planned
    deferred = planned.capture.program.deferred
    if region.unread is None and not deferred:
        return replace(planned, watched=captured().deferrable)
    region.unread = (region.unread or frozenset()) | (deferred - region.was_read)
    return planned


def with_outputs(
    settings: Settings,
    region: Region,
    captured: Capture,
    rebuilt: Callable[[Any], Any],
    *,
    all_deferred: bool,
) -> Capture:
    """Give a capture in which the outputs that are named, or were read, are made; and some, else.

    `rebuilt` gives what the function returns, if its region returns this.

    Raises:
        RematError: if an output is named that is not there.
    """
    if settings.outputs is not None:
        others = not_named_of_region(settings.outputs, captured, rebuilt)
        if region.expected is None:
            return with_named_outputs(captured, others)
        return captured.with_deferred_outputs(others & captured.deferrable)
    if all_deferred:
        return captured.with_deferred_outputs(captured.deferrable)
    if region.unread and _are_learned(settings):
        return captured.with_deferred_outputs(captured.deferrable & region.unread)
    return captured


def _are_learned(settings: Settings) -> bool:
    """Whether steps say which outputs are made."""
    able = abilities_of(get_executor(settings.executor))
    return Ability.DEFERS_OUTPUTS in able and are_learned(settings.outputs, settings.numerics)
