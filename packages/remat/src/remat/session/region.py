"""One graph that TorchDynamo found, and the plans that it is run by."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from remat.dynamo import Found
from remat.dynamo.checkpoints import with_checkpoints_of_eager, without_checkpoints
from remat.errors import BudgetWarning
from remat.planning.misfit import NotPlanned
from remat.planning.planner import Planned
from remat.plans.plan import Plan
from remat.session.counters import Counters
from remat.session.first_steps import PlannedCall, SeenLoss
from remat.session.region_calls import RegionPlan
from remat_exec import BudgetExceeded, Runnable
from remat_graph.torch import Capture, Costs, flatten, quietly
from remat_solvers import BudgetTooSmall

if TYPE_CHECKING:
    from remat.session.stepper import Stepper

__all__ = ["Prepared", "Region", "run_as_it_is"]

logger = logging.getLogger(__name__)

_SURE = 3  # backwards in a row over the same outputs
_MOST_NUMBERS = 64  # that a graph is captured and planned for, at a time


class Prepared(BaseException):
    """Ends a forward that was run to make a plan, before it changes anything: no error to catch."""


class Region:
    """One graph of Dynamo's, and the plans to run it by, one for each set of numbers that it reads.

    Called as Dynamo calls it, with a flat list of inputs, parameters and buffers among them.
    """

    def __init__(self, stepper: Stepper, found: Found, counters: Counters) -> None:
        self.stepper = stepper
        self._counters = counters
        self._found = with_checkpoints_of_eager(found.graph)
        self.graph, checkpoints = without_checkpoints(found.graph)
        self.name = f"{found.name}, {sum(n.op != 'placeholder' for n in found.graph.graph.nodes)}"
        self.whole = found.whole
        self.caller = found.caller
        if checkpoints:
            logger.info(
                "%s: %d checkpointed calls are planned as any other code; what is computed again "
                "is the plan's to say",
                self.name,
                checkpoints,
            )
        self.plans: dict[tuple[Any, ...], Planned | RegionPlan | NotPlanned | None] = {}
        self.runs_as_it_is = False
        self.came: frozenset[int] = frozenset()
        self.expected: frozenset[int] | None = None
        self.left: set[Hashable] = set()
        self.checked: dict[Hashable, Plan] = {}
        self.seen_loss: SeenLoss | None = None
        self.exceeded: Plan | None = None
        self._before: dict[tuple[Any, ...], Planned | RegionPlan | NotPlanned | None] = {}
        self.released_outputs: frozenset[int] | None = None
        self._captures: dict[tuple[Any, ...], Capture] = {}
        self._in_a_row = 0
        self._last_missing: frozenset[int] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the region: by its plan, or as it is where nothing needs a gradient."""
        stepper, inputs = self.stepper, tuple(self._counters.given(inputs))
        if stepper.answer is not None:
            return self._counters.put_back(stepper.answer, inputs)
        stepper.first_steps.finish()
        if self.runs_as_it_is:
            return self._as_it_is(inputs)
        if stepper.preparing and not any(map(_requires_grad, inputs)):
            raise Prepared
        if not torch.is_grad_enabled() or not any(map(_requires_grad, inputs)):
            stepper.rest()
            stepper.before_code()
            return self._as_it_is(inputs)
        key = self.numbers(inputs)
        if key not in self.plans:
            made = stepper.plan(self, inputs)
            _put(self.plans, key, self.settle(key, made) if isinstance(made, Planned) else made)
        planned = self.plans[key]
        if isinstance(planned, Planned):
            stepper.used(planned)
        if stepper.preparing:
            raise Prepared
        if planned is None:
            returned = self._as_it_is(inputs)
            if any(map(_requires_grad, flatten(returned)[0])):  # views of inputs, say
                stepper.met_nothing_to_plan(self, inputs)
            return returned
        stepper.met()
        if isinstance(planned, NotPlanned):
            stepper.used_none(planned)
            return self._as_it_is(inputs)
        tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
        if isinstance(planned, RegionPlan):
            outputs = stepper.together.run(
                planned, self.graph, tensors, self.backward_begins, lambda: self._plain(inputs)
            )
        else:
            call = _Call(self, key, planned)
            if not stepper.calls:
                stepper.first_steps.begin(call, tensors)
            outputs = planned.executable(self.graph, tensors, call.started, exceeded=call.exceeded)
            stepper.first_steps.returned()
            stepper.calls.add(call)
        returned = planned.capture.output_structure.rebuild(iter(outputs))
        return self._counters.put_back(returned, inputs)

    def _as_it_is(self, inputs: Sequence[Any]) -> Any:
        return run_as_it_is(self._found, self._counters, inputs)

    def _plain(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Run it as it is, with nothing checkpointed, and give the tensors that it returns."""
        with quietly():
            return flatten(self.graph(*inputs))[0]

    def numbers(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Give what a call is planned for: numbers that the graph reads, and sizes left open."""
        found = (inputs[position] for position in self._counters.matter)
        sized = (inputs[position] for position in self._counters.sized)
        return (
            *(item for item in found if not isinstance(item, torch.Tensor)),
            *((tuple(tensor.shape), tensor.stride()) for tensor in sized),
        )

    def captured(self, inputs: Sequence[Any], costs: Costs, *, loss_alone: bool = True) -> Capture:
        """Give the graph of a call: traced once, whatever is planned for."""
        key = (loss_alone, *self.numbers(inputs))
        known = self._captures.get(key)
        if known is None:
            with quietly():  # the original has warned of the same
                known = self.stepper.capture_region(
                    self.graph,
                    inputs,
                    costs=costs,
                    loss_alone=loss_alone,
                    real=self.stepper.real_strides,
                )
                numerics = self.stepper.numerics
                if loss_alone and numerics is not None:
                    known = known.with_alternatives(numerics, measured=self.stepper.measured)
            _put(self._captures, key, known)
        return known

    def backward_begins(
        self, executable: Runnable, missing: frozenset[int], released_outputs: frozenset[int]
    ) -> None:
        """See what the backward shows of a call that was planned with others."""
        self.stepper.backward_begins()
        self.learn(executable, missing, released_outputs)

    def learn(
        self, executable: Runnable, missing: frozenset[int], released_outputs: frozenset[int]
    ) -> None:
        """Plan from now on for the gradients that came, and for what the user still held.

        Not at once where the plan for fewer gradients could not be followed by a backward with all
        of them within the budget: it may be that outputs are used in turn.
        """
        self._in_a_row = self._in_a_row + 1 if missing == self._last_missing else 1
        self._last_missing = missing
        self.came |= executable.differentiable - missing
        expected = executable.differentiable - self.came
        changed = expected != executable.capture.missing and (
            expected != self.expected or self._in_a_row >= _SURE
        )
        if self.released_outputs is None or self.released_outputs - released_outputs:
            self.released_outputs = (
                released_outputs
                if self.released_outputs is None
                else self.released_outputs & released_outputs
            )
            changed = changed or executable.capture.release_changes_plan(self.released_outputs)
        if changed or self.expected is not None:
            self.expected = expected
        if changed:
            logger.info("the backward differs from what was planned for: planning anew")
            self._before, self.plans = self.plans, {}

    def see_loss(self, seen: SeenLoss, exceeded: Plan | None) -> None:
        """Plan from now on for what the code between forward and backward was seen to take.

        A plan that went over the budget is not run again.
        """
        self.seen_loss = seen
        if exceeded is not None:
            self.exceeded, self.plans = exceeded, {}

    def leave_loss(self, inputs: Sequence[Any], error: BudgetTooSmall | BudgetExceeded) -> None:
        """Run calls over the budget for which no plan has room for what was seen."""
        self.left.add(self.numbers(inputs))
        warnings.warn(
            f"no plan leaves room for what the code between forward and backward takes, so steps "
            f"go on over the budget: {error}",
            BudgetWarning,
            stacklevel=2,
        )

    def settle(self, key: tuple[Any, ...], planned: Planned) -> Planned:
        """Choose between a plan for the gradients that came and the one before it."""
        before = self._before.get(key)
        if before is None or self._in_a_row >= _SURE or not isinstance(before, Planned):
            return planned
        expected = planned.capture.missing
        if expected <= before.capture.missing or planned.executable.takes_all:
            return planned
        return before


@dataclass(eq=False)
class _Call(PlannedCall):
    """A call of a region that is all of a function, from its forward to its backward."""

    def started(self, missing: frozenset[int], released_outputs: frozenset[int]) -> None:
        """Learn what the backward, which begins, shows."""
        self.missing, self.released_outputs = missing, released_outputs
        self.region.stepper.backward_begins(self)
        self.region.stepper.first_steps.backward(self)
        self.region.learn(self.planned.executable, missing, released_outputs)

    def exceeded(self, error: BudgetExceeded) -> None:
        """Tell of a backward over the budget, which the next forward is planned for."""
        warnings.warn(
            f"{str(error).partition(';')[0]}. It runs, its gradients are right, and from the next "
            f"forward on it is planned for, within the budget",
            BudgetWarning,
            stacklevel=2,
        )


def run_as_it_is(graph: torch.fx.GraphModule, counters: Counters, inputs: Sequence[Any]) -> Any:
    """Run a graph without a plan."""
    with quietly():  # torch warns of tensors where the user's code had arrays
        return counters.put_back(graph(*inputs), inputs)


def _put(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], item: Any) -> None:
    """Keep what was made last, for so many numbers."""
    known[key] = item
    if len(known) > _MOST_NUMBERS:
        del known[next(iter(known))]


def _requires_grad(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.requires_grad
