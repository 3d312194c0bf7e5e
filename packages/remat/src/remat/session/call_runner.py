"""Runs the calls of regions, from the forward of each to the end of its backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from remat.planning.settings import Settings
from remat.planning.task import RunnablePlan
from remat.session.backwards import before_backward, within_backward
from remat.session.calls import Call, HandedOut, NewGradients, see_read, warn_exceeded
from remat.session.changes import Changes
from remat.session.deferring import waiting_outputs
from remat.session.kinds import CapturedRegion
from remat.session.leaving import hooked, watch_leaving
from remat.session.recording import gradients_present
from remat.session.region import Region
from remat.session.step import StepState
from remat.session.unplanned import Unplanned
from remat_exec import (
    Ability,
    HandOut,
    Repeats,
    abilities_of,
    autocast_type,
    get_executor,
    keeps_graph,
)
from remat_graph.torch import tensors_of_call
from remat_solvers.step import RegionOption

__all__ = ["CallRunner"]


class CallRunner:
    """Runs calls, and notes in the step under way what they show of it.

    `on_backward` is called where the backward of a call begins.
    """

    def __init__(self, step: StepState, settings: Settings) -> None:
        self._step, self._settings = step, settings
        self._autocast: torch.dtype | None = None
        self._beside_plan = Unplanned(step, settings)

    @functools.cached_property
    def _abilities(self) -> frozenset[Ability]:
        return abilities_of(get_executor(self._settings.executor))

    @property
    def _hands_out(self) -> bool:
        """Whether the executor takes what hands out outputs, and tells of who is refused."""
        return Ability.HANDS_OUT in self._abilities

    def run_one(
        self,
        region: Region,
        numbers: Hashable,
        planned: RunnablePlan,
        inputs: Sequence[Any],
        on_backward: Callable[[], None],
    ) -> list[torch.Tensor]:
        """Run the forward of a region that has the budget for itself.

        The first step by a plan is recorded; if gradients are there already, which do not count but
        may be let go of in the step, the second.
        """
        step, executable = self._step, planned.executable
        tensors, _ = tensors_of_call(inputs)
        call = Call(region, executable, on_backward, planned=planned, numbers=numbers)
        is_checked = region.checked.get(numbers) is planned.plan or numbers in region.left
        is_waiting = not region.has_waited and bool(gradients_present(tensors))
        region.has_waited |= is_waiting
        if not (step.lone_calls or is_checked or is_waiting):
            step.record_call(call, planned)
            step.recording.mark("forward 0")
        call.hooked = hooked(planned.capture, region.graph, tensors)
        begins = functools.partial(self._backward_begins, call)
        reads: dict[str, Any] = {"exceeded": functools.partial(warn_exceeded, weakref.ref(call))}
        watched = planned.watched if region.shown.unread is None else frozenset()
        if watched or planned.capture.program.deferred:
            read = functools.partial(see_read, weakref.ref(call), region)
            reads.update(read=read, watched=watched)
        if self._hands_out:
            reads["asked"] = region.split
        if Ability.REPEATS in self._abilities:
            reads["repeats"] = Repeats(region.room_again.bytes, region.keeps_graphs)
        outputs = executable(region.graph, tensors, begins, **reads)
        call.waiting = waiting_outputs(outputs)
        if step.records_call:
            step.recording.mark("kept 0")
        step.live.add(call)
        return outputs

    def run_shared(
        self,
        region: Region,
        plan: CapturedRegion,
        inputs: Sequence[Any],
        on_backward: Callable[[], None],
    ) -> list[torch.Tensor]:
        """Run the forward of a region that shares the budget with others."""
        step, recording, device = self._step, self._step.recording, plan.capture.program.device
        if recording.under_way and not recording.is_on(device):
            step.stop_recording()  # of a first step, whose device was not known
        if step.is_new and not recording.under_way:
            step.is_new = False
            self._begin_late(device)
        if step.runs_plain:
            return self._run_plain(region, plan, inputs, on_backward)
        tensors, _ = tensors_of_call(inputs)
        position = len(step.calls)
        option = self._next_option(step.pattern, plan)
        if self._step.patterns.off_plan and not recording.under_way:
            self._begin_late(device, collect=False)  # each step may be so
        step.calls.append((plan, option))
        watched = plan.changes.protect_inputs(tensors)
        if any(plan.changes.is_new(position) for position, *_ in watched):
            step.is_provisional = True  # later steps most often do not hold them twice
        executable = plan.executable(option)
        let_go, lean_let_go = plan.let_go(option)
        noted = plan.noted(option, tensors) if recording.under_way else None
        if noted is not None:
            step.noted.append(noted)
        call = Call(
            region,
            executable,
            on_backward,
            position,
            option=option,
            lean=plan.lean,
            changes=plan.changes,
            watched=watched,
            gradients=NewGradients(tensors),
            let_go=let_go,
            lean_let_go=lean_let_go,
            noted=noted,
        )
        call.hooked = hooked(plan.capture, region.graph, tensors)
        step.hooked.update(id(leaf()) for leaf in call.hooked.values())
        call.outputs_watched = step.outputs.watched(region, plan)
        self._make_room(max(option.forward_bytes, option.kept_bytes), "forward")
        self._step.bound.see(step.open_calls, option.forward_bytes)
        recording.mark(f"forward {position}")
        call.handed = HandedOut(plan.capture.deferred_bytes(call.outputs_watched))
        options, hand_out = self._reads(call, plan), self._hand_out(call, plan.changes)
        if self._hands_out:
            options.update(hand_out=hand_out, asked=region.split)
        if Ability.REPEATS in self._abilities:
            options["repeats"] = None  # what runs between regions has given its values back
        outputs = executable(
            region.graph,
            tensors,
            functools.partial(self._backward_begins, call),
            functools.partial(self._backward_ends, call),
            lambda drop: setattr(call, "drop", drop),
            **options,
        )
        if not self._hands_out:
            outputs = [hand_out(at, tensor) for at, tensor in enumerate(outputs)]
        call.waiting = waiting_outputs(outputs)
        step.await_call(call)
        step.outputs.add(region, plan.capture.program, outputs)
        return outputs

    def _hand_out(self, call: Call, changes: Changes) -> HandOut:
        """Give what hands out the outputs of a call that is made, some of them as copies."""
        step, is_kept, program = self._step, False, call.executable.capture.program

        def hand_out(at: int, output: torch.Tensor) -> torch.Tensor:
            nonlocal is_kept
            if not is_kept:
                step.recording.mark(f"kept {call.position}")
            is_kept = True
            base = program.outputs[at].base
            call.handed.add(output, program.storage.get(base, base))  # it may be made when read
            copied, watched = changes.protect_output(at, output)
            if watched is not None:
                step.is_provisional |= changes.is_new(~at)
                call.watched.append(watched)
            return copied

        return hand_out

    def _reads(self, call: Call, plan: CapturedRegion) -> dict[str, Any]:
        """Give what a call that shares the budget is told of reading."""
        if not (call.outputs_watched or plan.capture.program.deferred):
            return {}
        read = functools.partial(self._beside_plan.see_read, weakref.ref(call), call.region)
        return {"read": read, "watched": call.outputs_watched}

    def _run_plain(
        self,
        region: Region,
        plan: CapturedRegion,
        inputs: Sequence[Any],
        on_backward: Callable[[], None],
    ) -> list[torch.Tensor]:
        """Run the forward of a region as it is; it lives until its backward begins."""
        step, everything = self._step, plan.everything
        executable, position = plan.executable(plan.lean), len(step.calls)
        call = Call(region, executable, on_backward, position, option=everything)
        step.calls.append((plan, everything))
        step.recording.mark_present(tensors_of_call(inputs)[0])
        outputs = region.plain(inputs)
        step.await_call(call)

        def begins() -> None:
            step.live.discard(call)
            step.backward_begins()

        before_backward(outputs, begins)
        return outputs

    def _begin_late(self, device: torch.device, *, collect: bool = True) -> None:
        """Record the rest of a step, unless a checkpoint computes again in its backward."""
        if not within_backward():
            self._step.begun_late = True
            self._step.bound.record_from(len(self._step.calls))
            self._step.recording.start(device, collect=collect)

    def _next_option(self, calls: tuple[int, ...], plan: CapturedRegion) -> RegionOption:
        """Find the option of the call after these: planned, or that of other sizes, if it fits."""
        planned = self._step.patterns.option_for(calls, plan.kind)
        if planned is not None:
            return planned
        planner, kinds = self._step.planner, self._step.planner.kinds
        if not planner.is_unknown:  # a fraction is of steps of these calls, too
            planner.take_room(planner.budget((*calls, plan.kind)))
        families, kind = tuple(kinds[number].family for number in calls), kinds[plan.kind]
        alike = self._step.patterns.option_alike(families, kind.family)
        if alike is not None:
            fitting = self._fitting(calls, plan.kind)
            if fitting is not None:
                return fitting
            option = kind.by(alike)
            if option.peak_bytes <= self._room_left(plan.kind):
                return option
        return self._unplanned(plan)

    def _fitting(self, calls: tuple[int, ...], kind: int) -> RegionOption | None:
        """Find the fastest option of the call after these that surely fits; `None` without any.

        The sizes that were planned may be larger, so that this call can keep more than theirs.
        """
        planner, patterns = self._step.planner, self._step.patterns
        if planner.room is None:
            return None
        pattern = (*calls, kind)
        so_far = [option for _, option in self._step.calls]
        return patterns.fastest_fitting(
            planner.families(pattern), so_far, planner.stored(pattern), planner.kinds[kind].options,
            planner.room,
        )  # fmt: skip

    def _held(self, half: str, *kinds: int) -> int:
        """Bound what code between regions holds in a half of this step, with calls after these."""
        pattern = (*self._step.pattern, *kinds)
        planner = self._step.planner
        return self._step.patterns.held(half, planner.families(pattern), planner.stored(pattern))

    def _room_left(self, kind: int) -> int:
        """Give what open calls, and the code between regions, leave to a call of this kind.

        That code is taken to hold the most that it held at any time of a recorded step.
        """
        room = self._step.planner.room or self._step.planner.budget()
        kept = sum(call.kept_bytes for call in self._step.open_calls)
        return room - self._held("backward", kind) - kept

    def _unplanned(self, plan: CapturedRegion) -> RegionOption:
        """Find the option that keeps the least of those whose halves fit beside the open calls."""
        if self._step.planner.is_unknown:
            return plan.lean
        left = self._room_left(plan.kind)
        options = self._step.planner.kinds[plan.kind].options
        fitting = [option for option in options if option.peak_bytes <= left]
        if fitting:
            return min(fitting, key=lambda option: option.kept_bytes)
        return min(options, key=lambda option: option.peak_bytes)

    def _make_room(self, needed: int, half: str, own: Call | None = None) -> None:
        """Let earlier calls give back what they can make again, the largest first.

        What the code between regions holds is taken to be the most that it held at any time in
        this half of the steps that were recorded. Nothing is given back in a step that is planned,
        nor in one of other sizes that takes no more than the room, by what a planned one takes.
        """
        step, room = self._step, self._step.planner.room
        if not step.patterns.off_plan or room is None:
            return
        families, stored = step.planner.families(step.pattern), step.planner.stored(step.pattern)
        options = [option for _, option in step.calls]
        bound = step.patterns.peak_alike(families, options, stored)
        if bound is not None and bound <= room:
            return
        calls = sorted(self._step.open_calls, key=lambda call: -call.droppable_bytes)
        held = sum(call.kept_bytes for call in calls if call is not own)
        room -= self._held(half) + needed
        for call in calls:
            if held <= room:
                return
            if call is not own and call.droppable_bytes > 0:
                held -= call.droppable_bytes
                call.go_lean()
                self._step.recording.mark(f"lean {call.position}")

    def _backward_begins(
        self, call: Call, missing: frozenset[int], released_outputs: frozenset[int]
    ) -> None:
        """See that there is room for a backward, which begins, and learn what it shows."""
        step, option = self._step, call.option
        if option is None and call.missing is not None:  # another backward over its forward
            call.region.learn(call.executable, missing, released_outputs)
            return
        if option is None:
            call.missing, call.released_outputs = missing, released_outputs
            call.region.keeps_graphs |= keeps_graph()
            step.see_backward(call)
            step.live.discard(call)
            call.on_backward()
            step.backward_begins(call)
            call.region.learn(call.executable, missing, released_outputs)
            if call.planned is not None:
                call.region.see_unread(call.planned.watched & missing)
                watch_leaving(call.hooked, _see_leaving(call, call.planned))
            return
        call.end_watch()
        if step.see_backward(call):
            self._see_autocast(autocast_type(call.executable.capture.program.device))
            self._step.bound.backward_begins(step.open_calls)
            self._make_room(option.backward_bytes, "backward", call)
            self._step.bound.see(step.open_calls, option.backward_bytes, call)
            self._beside_plan.see_held(call, released_outputs)
            step.backward_begins(call)
        call.on_backward()
        self._beside_plan.see_gradients(call, missing)
        call.region.see_unread(call.outputs_watched & missing)
        step.outputs.end(call.region)
        leave = call.executable.capture.leaving_gradients
        see = functools.partial(
            call.region.see_leaving, leave, self._beside_plan.exceeded_if_staying, shared=True
        )
        watch_leaving(call.hooked, see, step.hooked)

    def _see_autocast(self, autocast: torch.dtype | None) -> None:
        """Record the next step if a backward's autocast is another than in those before it.

        Products in another type take memory for casts, which no earlier step has shown.
        """
        if autocast != self._autocast:
            self._autocast = autocast
            self._step.patterns.record_next = True

    def _backward_ends(self, call: Call) -> None:
        """Note that a backward has given out its gradients."""
        if call in self._step.live:
            self._step.recording.mark(f"given {call.position}")
            self._step.live.discard(call)
            self._step.handed_on.append(call.handed)
            self._step.bound.give(call.gradients)


def _see_leaving(
    call: Call, planned: RunnablePlan
) -> Callable[[frozenset[int], frozenset[int]], None]:
    """Give what sees which gradients stayed of a call that has the budget for itself."""
    budget = planned.plan.budget_bytes

    def exceeded() -> int | None:
        return budget if planned.executable.staying_peak_bytes > budget else None

    leave = planned.capture.leaving_gradients
    return functools.partial(call.region.see_leaving, leave, exceeded)
