"""One graph that TorchDynamo found, and the plans that it is run by."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from remat.dynamo import DynamoGraph
from remat.dynamo.checkpoints import with_checkpoints_of_eager, without_checkpoints
from remat.errors import BudgetWarning
from remat.planning.infeasible import NotPlanned
from remat.planning.task import RunnablePlan
from remat.plans.plan import Plan
from remat.session.buckets import Bucket
from remat.session.counters import Counters
from remat.session.kernels import RegionKernels
from remat.session.kinds import CapturedRegion
from remat.session.refused import RefusedCaptures
from remat.session.room_again import RoomAgain
from remat.session.shown import Learned, SeenLoss, Shown
from remat.session.sized_captures import SizedCaptures
from remat_exec import Executor, RepeatExceeded, Runnable
from remat_graph.torch import Capture, flatten, graph_runs, sharing

__all__ = [
    "Prepared",
    "Region",
    "device_of",
    "forget_last",
    "is_computed",
    "keep",
    "name_of",
    "requires_grad",
    "run_as_it_is",
]

logger = logging.getLogger(__name__)

Plans = dict[tuple[Any, ...], RunnablePlan | CapturedRegion | NotPlanned | None]

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_SURE = 3  # backwards in a row over the same outputs
_MOST_NUMBERS = 64  # that a graph is captured and planned for, at a time


class Prepared(BaseException):
    """Ends a forward that was run to make a plan, before it changes anything: no error to catch."""


class Region:
    """One graph of Dynamo's, and the plans to run it by, one for each set of numbers that it reads.

    A call that has the whole budget runs by one of its `plans`, one that shares it with other calls
    by one of the `shared`. Regions of one `place` in the code do the same with other sizes. Its
    inputs are a flat list, parameters and buffers among them. What its backwards show is learned,
    and planned for from then on.
    """

    def __init__(self, dynamo_graph: DynamoGraph, counters: Counters) -> None:
        self.counters = counters
        self._eager = with_checkpoints_of_eager(dynamo_graph.graph)
        self.graph, checkpoints = without_checkpoints(dynamo_graph.graph)
        self.name = name_of(dynamo_graph)
        self.place: Hashable = self.name, _outputs_of(dynamo_graph.graph.graph)
        self.whole = dynamo_graph.whole
        self.caller = dynamo_graph.caller
        if checkpoints:
            logger.info(
                "%s: %d checkpointed calls are planned as any other code; what is computed again "
                "is the plan's to say",
                self.name,
                checkpoints,
            )
        self.plans: Plans = {}
        self.shared: Plans = {}
        self.captures: dict[tuple[Any, ...], Capture] = {}
        self.kernels = RegionKernels()
        self.sized = SizedCaptures(self.graph, self.name)
        self.calls_in_steps: set[tuple[Any, ...]] = set()  # calls whose LSTMs are not in layers
        self.runs_as_it_is = False
        self.learned = Learned()
        self.not_named: frozenset[int] = frozenset()
        self.handed_on: frozenset[int] | None = None
        self.leaving: dict[bool, frozenset[int]] = {}
        self.seen_loss: SeenLoss | None = None
        self.exceeded: Plan | None = None
        self.room_again = RoomAgain()
        self.keeps_graphs = False
        self.left: set[Hashable] = set()
        self.refused = RefusedCaptures()
        self.checked: dict[Hashable, Plan] = {}
        self.rehearses_all_sizes = False
        self.has_waited = False  # for a step that begins without gradients
        self._buckets: dict[int, Bucket] = {}  # which hold the plans whose `id` they have
        self._before: Plans = {}
        self._in_a_row = 0
        self._last_missing: frozenset[int] | None = None
        self.split: Callable[[frozenset[int]], bool] = lambda _: False

    def as_it_is(self, inputs: Sequence[Any]) -> Any:
        """Run it without a plan, as Dynamo found it."""
        return run_as_it_is(self._eager, self.counters, inputs)

    def plain(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Run it as it is, with nothing checkpointed, and give the tensors that it returns."""
        with graph_runs():
            return flatten(self.graph(*inputs))[0]

    def numbers(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Give what a call is planned for: numbers it reads, open sizes, what is given twice."""
        inputs_that_matter = (inputs[position] for position in self.counters.matter)
        sized = (inputs[position] for position in self.counters.sized)
        return (
            *(item for item in inputs_that_matter if not isinstance(item, torch.Tensor)),
            *((tuple(tensor.shape), tensor.stride()) for tensor in sized),
            *sharing(inputs),
        )

    def plans_of(self, *, shared: bool) -> Plans:
        """Give the plans of calls that share the budget, or of those that have it."""
        return self.shared if shared else self.plans

    def know_as(self, other: Region) -> None:
        """Know what the steps of another region have shown, which is that of other sizes."""
        self.learned.take_over(other.learned)
        self.seen_loss, self.leaving = other.seen_loss, {**other.leaving}
        self.not_named, self.handed_on = other.not_named, other.handed_on
        self.room_again, self.keeps_graphs = replace(other.room_again), other.keeps_graphs
        self.runs_as_it_is = other.runs_as_it_is

    @property
    def shown(self) -> Shown:
        """What steps have shown of its outputs, and is planned for."""
        return self.learned.shown

    def learn(
        self,
        executable: Runnable,
        missing: frozenset[int],
        released_outputs: frozenset[int] | None,
    ) -> bool:
        """Plan from now on for the gradients that came, and for what the user still held.

        Give whether it is planned for, or nothing had room for it.

        What they hold is not known of a call that shares the budget, nor of an output that is made
        when it is read. Not at once where the plan for fewer gradients could not be followed by a
        backward with all of them within the budget: it may be that outputs are used in turn.
        """
        self._in_a_row = self._in_a_row + 1 if missing == self._last_missing else 1
        self._last_missing = missing
        before, planned = self.shown, executable.capture
        came = before.came | (executable.differentiable - missing)
        expected = executable.differentiable - came
        changed = expected != planned.missing and (
            expected != before.expected or self._in_a_row >= _SURE
        )
        asks_more, released = not planned.missing <= expected, before.released_outputs
        if released_outputs is not None:
            later = planned.program.deferred
            seen = released_outputs - later
            released = seen if released is None else released & (seen | later)
        if released is not None and released != before.released_outputs:
            changed = changed or planned.release_changes_plan(released)
            asks_more |= before.released_outputs is not None
        keeps_expecting = not changed and before.expected is None
        shown = replace(before, came=came, released_outputs=released,
                        expected=None if keeps_expecting else expected)  # fmt: skip
        is_learned = self.learned.see_backward(shown, asks_more=asks_more)
        if is_learned and changed:
            logger.info("the backward differs from what was planned for: planning anew")
            self._before, self.plans = self.plans, {}
            self._share_anew()
        return is_learned

    def plan_anew(self) -> None:
        """Plan anew for all calls."""
        self._before, self.plans = {}, {}
        self._share_anew()

    def _share_anew(self) -> None:
        """Plan anew for calls that share the budget; those of a step under way are superseded."""
        for plan in self.shared.values():
            if isinstance(plan, CapturedRegion):
                plan.is_superseded = True
        self.shared = {}

    def see_leaving(
        self,
        leave: frozenset[int],
        exceeded: Callable[[], int | None],
        stayed: frozenset[int],
        gone: frozenset[int],
        *,
        shared: bool = False,
    ) -> None:
        """Plan from now on for gradients that hooks let go of at once; never for more than before.

        Those of `leave` were to. Calls that are `shared` see it apart: a parameter of two of them
        has its gradient after both. `exceeded` gives the budget that the step may have taken more
        than if some stayed, or `None`.

        Warns:
            BudgetWarning: if some stayed that were to leave, and the plan has no room for them.
        """
        before = self.leaving.get(shared)
        self.leaving[shared] = gone if before is None else before - stayed
        late = leave & stayed
        if late and (budget := exceeded()) is not None:
            warnings.warn(
                f"{len(late)} gradients stayed that were to leave at once: hooks of their "
                f"parameters did not drop them, and this step may have taken more than the budget "
                f"of {budget:,} bytes. Gradients are right, and from the next step on they are "
                f"planned for",
                BudgetWarning,
                stacklevel=2,
            )
        if not late and (before is not None or gone == leave):
            return
        logger.info("%d gradients leave %s at once: planning anew", len(gone), self.name)
        if shared:
            self._share_anew()
        else:
            self._before, self.plans = {}, {}

    def see_unread(self, watched: frozenset[int]) -> None:
        """Make outputs no more that no step has read by the time that its backward begins."""
        if watched and self.shown.unread is None:
            self.learned.see_unread(watched)
            if self.shown.unread:
                logger.info("outputs of %s were not read: planning without them", self.name)
                self._before, self.plans = self.plans, {}
                self._share_anew()

    def see_not_named(self, positions: frozenset[int]) -> None:
        """Make outputs no more that `outputs=` does not name."""
        if positions - self.not_named:
            self.not_named |= positions
            self._share_anew()

    def see_read(self, position: int) -> bool:
        """Make an output in each step again, now that one has read it, unless no plan has room."""
        before = self.shown
        is_learned = self.learned.see_read(position)
        if is_learned and self.shown.unread != before.unread:
            self.plans = {}
            self._share_anew()
            logger.warning(
                "an output of %s that its steps do not make was read, which runs a part of the "
                "forward again; from the next forward on it is made, if the budget has room. "
                "outputs= says which are read",
                self.name,
            )
        return is_learned

    def see_loss(self, seen: SeenLoss, exceeded: Plan | None) -> None:
        """Plan from now on for what the code between forward and backward was seen to take.

        A plan that went over the budget is not run again.
        """
        self.seen_loss = seen
        if exceeded is not None:
            self.exceeded, self.plans = exceeded, {}

    def leave_room(self, error: RepeatExceeded) -> bool:
        """Plan anew with room for another backward over one forward; say whether that is new."""
        is_new = self.room_again.ask(error)
        if is_new:
            self.plans, self._before = {}, {}
        return is_new

    def leave_loss(self, inputs: Sequence[Any], error: str) -> None:
        """Run calls over the budget for which no plan has room for what was seen."""
        self.left.add(self.numbers(inputs))
        warnings.warn(
            f"no plan leaves room for what the code between forward and backward took, so steps of "
            f"these sizes may go over the budget: {error}",
            BudgetWarning,
            stacklevel=2,
        )

    def bucket_of(self, plan: RunnablePlan, executor: Executor) -> Bucket:
        """Give the sizes below that of a plan, which was rehearsed."""
        if id(plan.plan) not in self._buckets:
            there = [each.plan for each in self.plans.values() if isinstance(each, RunnablePlan)]
            kept = {key: self._buckets[key] for key in map(id, there) if key in self._buckets}
            self._buckets = {**kept, id(plan.plan): Bucket(plan, executor)}
        return self._buckets[id(plan.plan)]

    def rehearse_all_sizes(self) -> None:
        """Rehearse each size from now on: one took more than by what nearby sizes take."""
        self.rehearses_all_sizes = True
        rehearsed = (item for item in self.plans.items() if not is_unrehearsed(item[1]))
        self.plans = dict(rehearsed)

    def settle(self, key: tuple[Any, ...], planned: RunnablePlan) -> RunnablePlan:
        """Choose between a plan for the gradients that came and the one before it."""
        before = self._before.get(key)
        if before is None or self._in_a_row >= _SURE or not isinstance(before, RunnablePlan):
            return planned
        expected = planned.capture.missing
        if expected <= before.capture.missing or planned.executable.takes_all:
            return planned
        return before


def forget_last(regions: Iterable[Region], error: Exception) -> bool:
    """Plan no more for what a step last asked for, which nothing has room for, if one did."""
    last = max(regions, key=lambda region: region.learned.asked_more_at, default=None)
    if last is None or last.learned.asked_more_at < 0:
        return False
    last.learned.forget_last(last.name, error)
    last.plan_anew()
    return True


def is_unrehearsed(plan: object) -> bool:
    """Whether a plan was made for sizes near those of another, which was rehearsed."""
    return isinstance(plan, RunnablePlan) and plan.plan.measured_peak_bytes is None


def run_as_it_is(graph: torch.fx.GraphModule, counters: Counters, inputs: Sequence[Any]) -> Any:
    """Run a graph without a plan."""
    with graph_runs():  # torch warns of tensors where the user's code had arrays
        return counters.put_back(graph(*inputs), inputs)


def keep(kept: dict[Any, Any], numbers: Hashable, item: Any) -> None:
    """Keep what was made last, for so many numbers; plans that were rehearsed the longest."""
    kept[numbers] = item
    if len(kept) > _MOST_NUMBERS:
        unrehearsed = (key for key, other in kept.items() if is_unrehearsed(other))
        del kept[next(unrehearsed, next(iter(kept)))]


def name_of(dynamo_graph: DynamoGraph) -> str:
    """Name a graph by its frame and how much it computes: one of other sizes has the same name."""
    return f"{dynamo_graph.name}, {sum(map(_is_operation, dynamo_graph.graph.graph.nodes))}"


def _outputs_of(graph: torch.fx.Graph) -> tuple[int | None, ...]:
    """Give the positions of the operations that make what a graph returns; `None` of an input.

    Numbers are left out, as of the places of outputs: a size is one only where sizes change.
    """
    operations = {node: at for at, node in enumerate(filter(_is_operation, graph.nodes))}
    returned = torch.utils._pytree.tree_leaves(graph.output_node().args[0])
    nodes = [node for node in returned if isinstance(node, torch.fx.Node)]
    return tuple(operations.get(node) for node in nodes if not _is_number(node))


def _is_operation(node: torch.fx.Node) -> bool:
    """Whether a node computes with tensors: of numbers there are more where sizes change.

    They are computed there, and asserted.
    """
    if node.op == "placeholder" or _is_number(node):
        return False
    return "example_value" in node.meta or not all(map(_is_number, node.all_input_nodes))


def _is_number(node: torch.fx.Node) -> bool:
    """Whether a node is a number, or several, as a `torch.Size`."""
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("example_value"))
    return all(isinstance(leaf, _NUMBERS) for leaf in leaves)


def device_of(inputs: Iterable[Any]) -> torch.device:
    """Find the first device that is no CPU, if there is one."""
    devices = (item.device for item in inputs if isinstance(item, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def requires_grad(item: Any) -> bool:
    """Whether it is a tensor that something differentiates."""
    return isinstance(item, torch.Tensor) and item.requires_grad


def is_computed(tensors: Any, inputs: Any) -> bool:
    """Whether any of these has a gradient, is no leaf, and is no view of the inputs."""
    storages = set(map(_storage, flatten(inputs)[0]))
    return any(
        tensor.grad_fn is not None and _storage(tensor) not in storages
        for tensor in flatten(tensors)[0]
    )


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)
    storage: int = tensor.untyped_storage()._cdata
    return storage
