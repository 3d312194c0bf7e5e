"""Which outputs of a region its steps make: those that are named, or else those that were read.

Without names all are made at first, and watched. Those that no step has read by the time that its
backward begins are not made from then on; where no plan fits otherwise, none beside the loss is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from remat.planning.outputs import are_learned, not_named_of_region, with_named_outputs
from remat.planning.planner import RunnablePlan
from remat.planning.settings import Settings
from remat.session.region import Region
from remat_exec import Ability, abilities_of, get_executor
from remat_graph.torch import Capture

__all__ = ["learns_outputs", "note_deferred", "with_outputs"]


def with_outputs(
    settings: Settings, region: Region, captured: Capture, rebuilt: Callable[[Any], Any]
) -> Iterator[Capture]:
    """Give a capture in which the outputs that are named, or were read, are made; and some, else.

    Where steps say which are read, another follows, to be planned if the first does not fit, in
    which none is made that need not be. `rebuilt` gives what the function returns, if its region
    returns this.

    Raises:
        RematError: if an output is named that is not there.
    """
    if settings.outputs is not None:
        others = not_named_of_region(settings.outputs, captured, rebuilt)
        if region.expected is None:
            yield with_named_outputs(captured, others)
        else:
            yield captured.with_deferred_outputs(others & captured.deferrable)
        return
    if not learns_outputs(settings):
        yield captured
        return
    deferred = captured.deferrable & (region.unread or frozenset())
    yield captured.with_deferred_outputs(deferred)
    if settings.region_plan is None and captured.deferrable > deferred:
        yield captured.with_deferred_outputs(captured.deferrable)


def note_deferred(
    settings: Settings, region: Region, captured: Capture, planned: RunnablePlan
) -> RunnablePlan:
    """Give a plan that watches the outputs which it makes, until steps have said what is read."""
    if not learns_outputs(settings):
        return planned
    deferred = planned.capture.program.deferred
    if region.unread is None and not deferred:
        return replace(planned, watched=captured.deferrable)
    region.unread = (region.unread or frozenset()) | (deferred - region.was_read)
    return planned


def learns_outputs(settings: Settings) -> bool:
    """Whether steps say which outputs are made."""
    able = abilities_of(get_executor(settings.executor))
    return Ability.DEFERS_OUTPUTS in able and are_learned(settings.outputs, settings.numerics)
