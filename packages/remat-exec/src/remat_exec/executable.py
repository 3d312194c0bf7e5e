"""A plan that can run: its code, its backward for other gradients, its rehearsal."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch

from remat_exec.autocast import lowered_bytes
from remat_exec.chain import run_step
from remat_exec.codegen import generate
from remat_exec.errors import BackwardError, BudgetExceeded, ExecutionError
from remat_exec.fallback import backward_from
from remat_exec.inner_reads import inner_reads
from remat_exec.interface import Ability
from remat_exec.loss import Loss
from remat_exec.measure import Peak, measure_peak
from remat_exec.on_demand import Recipe
from remat_exec.outputs import HandOut, Outputs
from remat_exec.overlaps import check_apart
from remat_exec.partial_gradients import Asked, connect
from remat_exec.rehearsal import run_without_autograd
from remat_exec.repeats import Repeats
from remat_exec.room import Room
from remat_exec.step_run import Exceeded, Observers, Read, Started
from remat_exec.variant import Variant
from remat_graph import RematError, Schedule
from remat_graph.torch import Capture, Program, generators_restored, process_lock, tensor_at

__all__ = ["Executable"]

_NONE: frozenset[str] = frozenset()
_REPEATS = Repeats()
_MOST_IN_PART = 16  # backwards without what is not asked for, kept at a time
_Asked: TypeAlias = tuple[frozenset[int], torch.dtype | None, frozenset[str]]


@dataclass
class Executable:
    """A plan that can run any number of times, and by several modules at once.

    `budget_bytes` bounds what a backward may take that was not planned for. With fewer gradients
    than planned for, a backward runs within the plan's memory. With a gradient that was taken to be
    missing, it follows the plan as far as it goes, if that fits. `groups` are the inputs whose
    gradients are handed out together, in order; those that only an unplanned backward has gradients
    for come last.

    `low_memory_plan` is another plan of the same capture. If memory runs short, its backward can
    take over after the forward of this plan. It is `None` where that backward would read what this
    plan does not keep.

    Raises:
        InvalidSchedule: if the simulator rejects the schedule.
    """

    abilities: ClassVar[frozenset[Ability]] = frozenset(Ability)

    capture: Capture
    schedule: Schedule
    budget_bytes: int | None = None
    low_memory_plan: Executable | None = None
    _variants: dict[_Asked, Variant] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        missing = self.capture.missing
        deferred = sorted(self.capture.program.deferred)
        whole = self.capture.whole_program
        self.recipes = tuple(Recipe.of(whole, position) for position in deferred)
        self._noted = frozenset().union(*(recipe.draws for recipe in self.recipes))
        self.keeps_values_for_other_backwards = bool(missing)
        self._may_come = bool(missing) and not self.capture.dry  # a backward with all gradients
        if self._may_come and not self.capture.variants_are_read_off:
            _ = self.capture.over_all_outputs  # nothing is captured within a backward
        self.code = generate(
            self.capture.program, self.capture.graph, self.schedule,
            save_all=bool(missing) or self.low_memory_plan is not None, noted=self._noted,
            others=self._compared_by_others(),
        )  # fmt: skip
        self.low_memory_plan = self._if_it_can_follow(self.low_memory_plan)
        self.device = self.capture.program.device
        targets = {write.target for write in self.capture.program.writes.values()}
        inputs = enumerate(self.capture.program.inputs)
        self._written = [position for position, item in inputs if item.variable in targets]
        returned = self.capture.program.returned
        self.differentiable = frozenset({*self.capture.program.tangents.values(), *missing})
        self._inner_reads = inner_reads(whole, self.differentiable)
        self.not_differentiable = tuple(set(range(len(returned))) - self.differentiable)
        planned = {name for group in self.code.groups for name in group.inputs}
        unplanned = tuple(name for name in self.capture.differentiable if name not in planned)
        self.groups = tuple(group.inputs for group in self.code.groups)
        self.groups += (unplanned,) if unplanned else ()
        planned_one = Variant(missing, self.code, self.capture.program, self.whole_program)
        self._variants[missing, None, _NONE] = planned_one

    def at(
        self, capture: Capture, peak_bytes: int, budget_bytes: int | None = None,
        low_memory_plan: Executable | None = None,
    ) -> Executable | None:  # fmt: skip
        """Give the same plan for other sizes, by the same code; `None` if that is of its own.

        One with a `low_memory_plan` has the one that is given, of those sizes, if it can follow.
        """
        program, mine = capture.program, self.capture.program
        alike = [None if each.generic is None else each.generic.program for each in (program, mine)]
        if alike[0] is None or alike[0] is not alike[1] or mine.leaving:
            return None
        if self.low_memory_plan is not None and low_memory_plan is None:
            return None
        if self._may_come and not capture.variants_are_read_off:
            return None
        other = copy.copy(self)
        other.capture, other.budget_bytes = capture, budget_bytes
        other.code = self.code.at(program, peak_bytes)
        lean = low_memory_plan if self.low_memory_plan is not None else None
        other.low_memory_plan = other._if_it_can_follow(lean)
        other.recipes = tuple(recipe.at(capture.whole_program) for recipe in self.recipes)
        planned = Variant(capture.missing, other.code, program, other.whole_program)
        other._variants = {(capture.missing, None, _NONE): planned}
        vars(other).pop("_over_all", None)  # of these sizes
        return other

    def _if_it_can_follow(self, plan: Executable | None) -> Executable | None:
        """Give a plan if all that its backward reads is there after the forward of this one."""
        there = {*self.code.saved, *self.capture.program.taken}
        return plan if plan is not None and there.issuperset(plan.code.saved) else None

    def _compared_by_others(self) -> frozenset[str] | None:
        """List what the backwards that may be run in place of the planned one compare.

        One over all outputs compares all that one over some does. `None` if it cannot be made.
        """
        if self.capture.dry:
            return None
        lean = self.low_memory_plan
        codes = [] if lean is None else [lean.code]
        if self._may_come:
            try:
                codes += [plan._over_all.code for plan in (self, lean) if plan is not None]
            except RematError:
                return None
        return frozenset().union(*(code.compared for code in codes))

    @functools.cached_property
    def _over_all(self) -> Variant:
        """A backward with all gradients, whether or not all is there that it reads."""
        return self._over_others(frozenset(), None, _NONE)

    def __deepcopy__(self, memo: dict[int, Any]) -> Executable:
        """Return the executable itself: it holds no state of any module."""
        return self

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of the generated code in bytes, with what a loss may keep."""
        return self.code.peak_bytes

    def peak_without(self, missing: frozenset[int]) -> int:
        """Predict the peak in bytes where the gradients at these positions do not come."""
        return self.variant(missing).code.peak_bytes

    @property
    def staying_peak_bytes(self) -> int:
        """The predicted peak where the gradients stay that were to leave at once."""
        return self.code.staying_peak_bytes

    @property
    def source(self) -> str:
        """The generated code."""
        return self.code.source

    def bind(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> list[Any]:
        """Collect the tensors that the program reads, in its order.

        Raises:
            ExecutionError: if the capture is of tensors without data; if a tensor that the forward
                writes to overlaps with another one, since no captured program knows of that.
        """
        if self.capture.dry:
            raise ExecutionError(
                "a plan on meta, or of fake tensors, can be read but not run; plan with real ones, "
                "on the device that is to run it"
            )
        program = self.capture.program
        bound: list[Any] = [tensor_at(module, tensors, i.kind, i.key) for i in program.inputs]
        if self._written:
            check_apart(bound, self._written)
        bound.extend(program.constants.values())
        return bound

    def __call__(
        self,
        module: torch.nn.Module,
        tensors: list[torch.Tensor],
        started: Started | None = None,
        finished: Callable[[], None] | None = None,
        droppable: Callable[[Callable[[], None]], None] | None = None,
        exceeded: Exceeded | None = None,
        read: Read | None = None,
        watched: frozenset[int] = frozenset(),
        hand_out: HandOut | None = None,
        asked: Asked | None = None,
        repeats: Repeats | None = _REPEATS,
    ) -> list[torch.Tensor]:
        """Run the forward as `Runnable` says; return the output tensors, connected to autograd.

        `read` gets the position of an output that the program does not make when it is read, and of
        those that are `watched`. If it is read between the halves, and there is no room, `exceeded`
        gets the error, too, or it is raised. `hand_out` gets each output, with its position among
        those of the user, and gives what is returned in its place. `asked` gets the positions of
        outputs whose whole gradients are asked for, and says whether the next call will have them.
        Another backward over a graph that was kept runs the forward again, as `repeats` says, or is
        refused where that is `None`.
        """
        bound = self.bind(module, tensors)
        program = self.capture.program
        by_name = dict(zip((i.variable for i in program.inputs), bound, strict=False))
        observers = Observers(started, finished, exceeded, read, watched)
        handed, drop = run_step(self, bound, by_name, observers, repeats)
        if droppable is not None:
            droppable(drop)
        outputs = Outputs(self.whole_program, handed, by_name, hand_out)
        if self._inner_reads is not None:
            connect(outputs, self.whole_program, self._inner_reads, handed, asked)
        return outputs.all()

    @property
    def room(self) -> Room:
        """What a backward may take."""
        return Room(self.capture, self.schedule, self.code, self.budget_bytes)

    @property
    def whole_program(self) -> Program:
        """The program by which outputs are made of what is handed over, also deferred ones."""
        capture = self.capture
        return capture.whole_program if capture.program.deferred else capture.program

    def rehearse(
        self, module: torch.nn.Module, tensors: list[torch.Tensor], loss: Loss | None = None
    ) -> Peak:
        """Run one forward and backward to measure the peak; change nothing.

        Gradients go nowhere, writes go to copies, and the random generators are put back. The
        gradients of the outputs come from `loss`, called with what the module returns. Without a
        loss they are ones, and what the plan leaves for a loss is allocated.
        """
        program = self.capture.program
        bound = self.bind(module, tensors)
        written = {write.target for write in program.writes.values()}
        for position, item in enumerate(program.inputs):
            if item.variable in written:
                bound[position] = bound[position].clone()
        with (
            process_lock,
            generators_restored(),
            torch.no_grad(),
            measure_peak(self.device, collect=False) as peak,
        ):
            run_without_autograd(self, bound, loss)
        return peak

    def variant(
        self,
        missing: frozenset[int],
        autocast: torch.dtype | None = None,
        unwanted: frozenset[str] = _NONE,
    ) -> Variant:
        """Find the backward for when the gradients at these positions do not come.

        `autocast` is the type of the autocast in which the backward is called. `unwanted` are
        inputs whose gradients nobody asks for; what only they need is left out.

        Raises:
            BackwardError: if it needs what the planned forward did not keep.
            BudgetExceeded: if it takes more memory than the budget in this autocast.
        """
        asked = missing, autocast, unwanted
        variant = self._variants.get(asked)
        if variant is None:
            planned = self.capture.missing <= missing
            make = self._with_fewer if planned else self._with_others
            try:
                variant = make(*asked)
            except BackwardError as error:
                if self.capture.program.deferred <= missing:
                    raise
                raise BackwardError(
                    f"this backward is over an output that the plan does not make ({error}); name "
                    f"the output in outputs= of remat.rematerialize"
                ) from error
            self._variants[asked] = variant
            in_part = [key for key in self._variants if key[-1]]
            if len(in_part) > _MOST_IN_PART:
                del self._variants[in_part[0]]
        return variant

    def reading_bytes(self, position: int) -> int:
        """Give what making a deferred output holds at most, the output included."""
        return next(recipe.peak_bytes for recipe in self.recipes if recipe.position == position)

    @property
    def takes_all(self) -> bool:
        """Whether a backward over all outputs can follow within the budget."""
        try:
            self.room.check(self.variant(frozenset()), self.capture.released_outputs)
        except (BackwardError, BudgetExceeded):
            return False
        return True

    def _with_fewer(
        self, missing: frozenset[int], autocast: torch.dtype | None, unwanted: frozenset[str]
    ) -> Variant:
        """Make the planned backward for fewer gradients than planned for."""
        if autocast is not None and not lowered_bytes(self.capture.program, autocast):
            return self.variant(missing, None, unwanted)
        code = generate(
            self.capture.program, self.capture.graph, self.schedule,
            save_all=self.keeps_values_for_other_backwards, missing=missing, unwanted=unwanted,
            autocast=autocast, noted=self._noted,
        )  # fmt: skip
        if autocast is not None:
            self.room.check_peak(
                code.peak_bytes,
                "within an autocast, which casts what the forward ran in another type",
                "leave the autocast before backward, or raise the budget",
            )
        return Variant(missing, code, self.capture.program, self.whole_program)

    def _with_others(
        self, missing: frozenset[int], autocast: torch.dtype | None, unwanted: frozenset[str]
    ) -> Variant:
        """Make a backward with gradients that were not planned for, if all that it reads is there.

        Of what the user was handed nothing is kept that the plan does not read.
        """
        is_over_all = not (missing or autocast or unwanted)
        variant = self._over_all if is_over_all else self._over_others(missing, autocast, unwanted)
        there = {*self.code.saved, *variant.program.taken}
        lacking = [name for name in variant.code.saved if name not in there]
        if lacking:
            raise BackwardError(
                f"this backward, over other outputs than planned for, reads {lacking[0]}, which "
                f"the plan does not keep; run forward again, it will be planned anew"
            )
        return variant

    def _over_others(
        self, missing: frozenset[int], autocast: torch.dtype | None, unwanted: frozenset[str]
    ) -> Variant:
        whole = self.capture.over_all_outputs if self._may_come else self.capture
        loss = self.capture.loss  # allowed no more where no budget holds for this call alone
        other = whole.with_loss(loss if self.budget_bytes is None else loss.at_least(whole.loss))
        if _forward_order(other.program) != _forward_order(self.capture.program):
            raise BackwardError(
                "this backward, over other outputs than planned for, needs another forward; "
                "run forward again, it will be planned anew"
            )
        code = generate(
            other.program,
            other.graph,
            backward_from(other.graph, self.schedule, self.capture.graph.value_by_name),
            save_all=True, missing=missing, unwanted=unwanted, autocast=autocast,
        )  # fmt: skip
        return Variant(missing, code, other.program, other.whole_program)


def _forward_order(program: Program) -> tuple[str, ...]:
    """List the ops that every forward runs."""
    forward = program.order[: program.order.index("loss")]
    return tuple(op for op in forward if op not in program.alternatives)
