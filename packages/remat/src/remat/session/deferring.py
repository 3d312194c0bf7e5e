"""Which outputs of a region its steps make: those that are named, or else those that were read.

Without names all are made at first; where no plan fits so, none beside the loss is made. Where
steps say what is read, they are watched: those that no step has read by the time that its backward
begins are not made from then on, unless there is room for all and it would be slower.

Of several regions, the first step has ordinary tensors, of which it is seen by their memory whether
later regions read them, and whether the model returns them under a name. Only what no region reads
is watched then, or made when it is read: TorchDynamo would find other graphs. Where ranks may free
what an output is made of, as the parameters of FSDP2, all are made.
"""

from __future__ import annotations

import timeit
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat.planning.outputs import (
    are_learned,
    are_optional,
    leaves_named,
    not_named_of_region,
    with_named_outputs,
)
from remat.planning.settings import Settings
from remat.planning.task import RunnablePlan
from remat.session.calls import Call
from remat.session.kinds import CapturedRegion
from remat.session.region import Region
from remat_exec import (
    Ability,
    BudgetExceeded,
    DeferredTensor,
    abilities_of,
    checksum,
    get_executor,
)
from remat_graph import simulate
from remat_graph.torch import Capture, Program, flatten, tensors_of_call
from remat_solvers import BudgetTooSmall, store_all

__all__ = [
    "OutputUses",
    "learns_outputs",
    "note_deferred",
    "note_deferred_of_region",
    "waiting_outputs",
    "with_outputs",
    "with_unread_deferred",
]

_REPEATS = 3  # of what is timed
_MORE = 8  # times what outputs spare may be missing, of the best that was found: not of the least

_weak: Any = StorageWeakRef


def with_outputs(
    settings: Settings, region: Region, captured: Capture, rebuilt: Callable[[Any], Any]
) -> list[Callable[[], Capture]]:
    """Give what makes a capture that makes the outputs which are named, or were read.

    Where none is named, another follows, to be planned if the first does not fit, in which none is
    made that need not be. `rebuilt` gives what the function returns, if its region returns this.

    Raises:
        RematError: if an output is named that is not there.
    """
    if settings.outputs is not None:
        others = not_named_of_region(settings.outputs, captured, rebuilt)
        if region.shown.expected is None:
            return [partial(with_named_outputs, captured, others)]
        return [partial(captured.with_deferred_outputs, others & captured.deferrable)]
    unread = region.shown.unread or frozenset()
    deferred = captured.deferrable & unread if unread else unread
    ways: list[Callable[[], Capture]] = [partial(captured.with_deferred_outputs, deferred)]
    if settings.region_plan is None and _are_optional(settings) and captured.deferrable > deferred:
        ways.append(partial(captured.with_deferred_outputs, captured.deferrable))
    return ways


def note_deferred(
    settings: Settings,
    region: Region,
    captured: Capture,
    planned: RunnablePlan,
    inputs: Sequence[Any],
    plan: Callable[[Capture], RunnablePlan],
) -> RunnablePlan:
    """Give a plan that watches the outputs which it makes, until steps have said what is read.

    By then it may be another, which makes outputs that nobody reads, if `plan` finds that faster.
    """
    if not _are_optional(settings):
        return planned
    planned = _with_outputs_if_faster(settings, captured, planned, inputs, plan)
    deferred = planned.capture.program.deferred
    if region.shown.unread is None and not deferred:
        learns = learns_outputs(settings)
        return replace(planned, watched=captured.deferrable) if learns else planned
    region.learned.leave_out(deferred)
    return planned


def _with_outputs_if_faster(
    settings: Settings,
    whole: Capture,
    planned: RunnablePlan,
    inputs: Sequence[Any],
    plan: Callable[[Capture], RunnablePlan],
) -> RunnablePlan:
    """Give a plan by which outputs are made that nobody reads, where that is faster.

    Making them later has its price, too: what they are made of is summed up in each step. It is
    looked at where all can be stored within the budget of the plan without them; for `whole` makes
    them.
    """
    capture, budget = planned.capture, planned.plan.budget_bytes
    if not capture.program.deferred or settings.region_plan is not None:
        return planned
    whole = whole.with_leaving_gradients(capture.leaving_gradients)
    if simulate(whole.graph, store_all(whole.graph)).peak_bytes > budget:
        return planned
    try:
        other = plan(whole)
    except (BudgetTooSmall, BudgetExceeded):
        return planned
    tensors, _ = tensors_of_call(inputs)
    sums = min(timeit.repeat(lambda: [*map(checksum, tensors)], number=1, repeat=_REPEATS))
    return other if other.plan.time <= planned.plan.time + sums else planned


def with_unread_deferred(settings: Settings, region: Region, captured: Capture) -> Capture:
    """Give the capture of a call that shares the budget, without the outputs that nobody reads."""
    unread = region.shown.unread if settings.outputs is None else region.not_named
    if not unread or not _may_defer(settings):
        return captured
    return captured.with_deferred_outputs(captured.deferrable & unread)


def note_deferred_of_region(settings: Settings, region: Region, plan: CapturedRegion) -> None:
    """Note what a call that shares the budget does not make."""
    deferred = plan.capture.program.deferred
    if settings.outputs is not None:
        region.not_named |= deferred
    elif deferred:
        region.learned.leave_out(deferred)


def _may_defer(settings: Settings) -> bool:
    """Whether outputs of several regions may be made when they are read."""
    able = Ability.DEFERS_OUTPUTS in abilities_of(get_executor(settings.executor))
    distributed = torch.distributed
    return able and not (distributed.is_available() and distributed.is_initialized())


def learns_outputs(settings: Settings) -> bool:
    """Whether steps say which outputs are made."""
    return are_learned(settings.outputs, settings.numerics) and _are_optional(settings)


def _are_optional(settings: Settings) -> bool:
    """Whether outputs may be left out that nobody names."""
    return are_optional(settings.outputs, get_executor(settings.executor))


def waiting_outputs(outputs: Iterable[torch.Tensor]) -> list[weakref.ref[DeferredTensor]]:
    """List the outputs of a call that are watched, or made when they are read."""
    return [weakref.ref(each.origin) for each in outputs if isinstance(each, DeferredTensor)]


class OutputUses:
    """Who has the outputs of a step's calls: later regions, and whom the model returns to.

    They are told apart by their memory. Regions are followed in one step that comes to a backward.
    From then on `watched` gives which outputs of a call are to be seen read: where steps say what
    is made, or once no plan fitted that makes all. `was_read` says that one was read in this step,
    before the backward was over, that its call does not make.
    """

    def __init__(self, settings: Settings) -> None:
        self._named = settings.outputs
        self._settings = settings
        self.was_read = False
        self._watches = learns_outputs(settings)
        self.regions: weakref.WeakSet[Region] = weakref.WeakSet()
        self._outputs: dict[int, tuple[Any, Region, int]] = {}
        self._handed_on: dict[Region, set[int]] = {}

    def clear(self) -> None:
        """Begin a step."""
        self.was_read = False
        self._outputs.clear()
        self._handed_on.clear()

    def begin_watching(self, error: BudgetTooSmall | BudgetExceeded) -> bool:
        """Watch outputs from the next step on, where no plan fits; whether that may be of use.

        It is not where all that may wait is far less than the bytes that are missing.
        """
        if self._watches or self._settings.step_plan or not _are_optional(self._settings):
            return False
        if not _may_defer(self._settings):
            return False
        spared = [_most_spared(region.shared.values()) for region in self.regions]
        least = error.peak_bytes if isinstance(error, BudgetExceeded) else error.smallest_bytes
        self._watches = _MORE * sum(spared) >= max(1, least - error.budget_bytes)
        return self._watches

    def watched(self, region: Region, plan: CapturedRegion) -> frozenset[int]:
        """Give the outputs of which a call sees whether they are read."""
        is_followed = region.shown.unread is None and region.handed_on is not None
        if not (self._watches and is_followed) or plan.changes.copies_outputs:
            return frozenset()
        others = plan.deferrable - (region.handed_on or frozenset())
        return others if _may_defer(self._settings) else frozenset()

    def add(self, region: Region, program: Program, outputs: Sequence[torch.Tensor]) -> None:
        """Follow the outputs of a call, unless those of its region have been followed."""
        self.regions.add(region)
        if region.handed_on is not None:
            return
        self._handed_on.setdefault(region, set())
        position = {name: at for at, name in enumerate(program.returned)}
        for output, tensor in zip(program.outputs, outputs, strict=True):
            storage = _storage(tensor)
            if storage is not None and output.base in position:
                ref = _weak(storage)
                self._outputs[storage._cdata] = ref, region, position[output.base]

    def see_inputs(self, inputs: Sequence[Any]) -> None:
        """See what a region reads."""
        for region, position in filter(None, map(self._of, inputs if self._outputs else ())):
            self._handed_on[region].add(position)

    def see_returned(self, returned: Any) -> None:
        """See which outputs the model returns under no name that the user reads.

        Raises:
            RematError: if an output is named that is not there.
        """
        if self._named is None or not self._outputs:
            return
        tensors, structure = flatten(returned)
        leaves = leaves_named(self._named, structure)
        not_named: dict[Region, set[int]] = {}
        for at, tensor in enumerate(tensors):
            found = self._of(tensor)
            if found is not None and at in leaves:
                self._handed_on[found[0]].add(found[1])
            elif found is not None:
                not_named.setdefault(found[0], set()).add(found[1])
        for region, positions in not_named.items():
            region.see_not_named(frozenset(positions - self._handed_on[region]))

    def read_kept(self, calls: Iterable[Call], returned: Any) -> None:
        """Read the waiting outputs of calls that somebody keeps, and that are not returned.

        A hook or an attribute keeps them for later, when they may be made no more: what they are
        made of changes in the optimizer's step. Not where the user names what is read.
        """
        waiting = [ref() for call in calls for ref in call.waiting]
        if waiting and self._named is None:
            tensors = (each for each in flatten(returned)[0] if isinstance(each, DeferredTensor))
            handed = {id(each.origin) for each in tensors}
            for output in waiting:
                if output is not None and id(output) not in handed:
                    _ = output.made
        for call in calls:
            call.waiting = []

    def end(self, region: Region) -> None:
        """End following a region, the backward of a call of which begins."""
        if region.handed_on is None and region in self._handed_on:
            region.handed_on = frozenset(self._handed_on[region])

    def _of(self, tensor: Any) -> tuple[Region, int] | None:
        storage = _storage(tensor)
        found = None if storage is None else self._outputs.get(storage._cdata)
        return None if found is None or found[0].expired() else found[1:]


def _storage(tensor: Any) -> Any:
    """Give the memory of a tensor that has some."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DeferredTensor):
        return None
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def _most_spared(plans: Iterable[Any]) -> int:
    """Bound what a region takes less if it makes none of its outputs that may wait."""
    able = [plan for plan in plans if isinstance(plan, CapturedRegion) and plan.deferrable]
    if not able:
        return 0
    largest = max(able, key=lambda plan: plan.capture.deferred_bytes(plan.deferrable))
    whole, left = (
        largest.capture.with_deferred_outputs(positions).graph
        for positions in (frozenset[int](), largest.deferrable)
    )
    gone = [op.workspace_bytes for op in whole.ops if op.name not in left.op_index]
    kept = sum(value.size_bytes for value in left.values)
    made = sum(value.size_bytes for value in whole.values) - kept + max(gone, default=0)
    return made + largest.capture.deferred_bytes(largest.deferrable)
