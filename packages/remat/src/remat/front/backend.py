"""The other way in: `torch.compile(model, backend="remat", options={"budget": "8GiB"})`.

The options are `budget`, `solver`, `costs`, `limit_seconds`, `progress`, `capture`, `executor`,
`optimizer`, `on_infeasible`, `plan`, `numerics`, `partitioner`, `kernels` and `wait`, as of
`rematerialize`; without a budget it is `"auto"`. `on_plan` is a function that is called with each
plan that a step begins to run by, such as `lambda plan: plan.save("plan.json")`. All that one
`torch.compile` compiles is of one step, under one budget. Steps of several with equal options are
joined where calls of both wait for a backward at the same time, as those of blocks do that are
compiled each by itself. Settings of TorchDynamo are the user's here: past its recompile limit it
runs code as it is, so the last compilation before it raises, and names the setting.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from remat.budgets.auto import AutoBudget
from remat.dynamo import (
    compiled_call,
    frame_of_call,
    graph_in_frame,
    is_last_compilation,
    let_through,
    watch_calls,
)
from remat.errors import BudgetWarning, RematError
from remat.planning.settings import Settings
from remat.refusals import refuse_checkpointed
from remat.session.cuts import Cuts
from remat.session.region import is_computed
from remat.session.session import Session
from remat.session.threads import Sessions, SharedRegion

__all__ = ["OPTIONS", "remat_backend"]

logger = logging.getLogger(__name__)

# What a model takes and returns is not in its graphs, and steps show which gradients leave.
_OF_MODELS = ("loss", "outputs", "optimizer_in_backward")
OPTIONS = [name for name in inspect.signature(Settings.read).parameters if name not in _OF_MODELS]
OPTIONS.append("on_plan")


@dataclass(eq=False)
class _Alike:
    """Code compiled with equal options: one step for each `torch.compile`, by what stands for it.

    Those whose calls were seen to wait for their backward at the same time are of one step.
    """

    options: Mapping[str, Any] | None
    settings: Settings
    on_plan: Callable[[Any], None]
    steps: WeakKeyDictionary[Any, _Step] = field(default_factory=WeakKeyDictionary)

    def step(self) -> _Step:
        """Give the step that the code at work is part of.

        Raises:
            RematError: if it is called by `torch.utils.checkpoint`.
        """
        if torch.is_grad_enabled():
            refuse_checkpointed("what torch.compile made", frame_of_call())
        call = compiled_call() or self
        step = self.steps.get(call)
        if step is None:
            step = self.steps[call] = _Step(Sessions(self._session, self.settings.user_plan))
        return step

    def _session(self, cuts: Cuts) -> Session:
        auto = AutoBudget(self.settings.optimizer)
        return Session(self.settings, self.on_plan, auto, cuts, join=self._join)

    def _join(self, session: Session) -> int:
        """Join a step with all that wait for a backward beside it; say how many calls those are."""
        steps = set(self.steps.values())
        own, thread = next(
            ((step, of) for step in steps if (of := step.sessions.thread_of(session))), (None, None)
        )
        if own is None or thread is None:
            return 0
        waiting = {step: step.sessions.waiting(thread) for step in steps - {own}}
        for call, step in list(self.steps.items()):
            if waiting.get(step):
                self.steps[call] = own
        return sum(waiting.values())


@dataclass(eq=False)
class _Step:
    """What runs the step of one `torch.compile` or several, and the frames that Dynamo found."""

    sessions: Sessions
    frames: set[int] = field(default_factory=set)


_compiled: list[_Alike] = []
_warned: WeakSet[Any] = WeakSet()


def remat_backend(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> SharedRegion:
    """Make a region of a graph, as a back end of `torch.compile`.

    Raises:
        RematError: if an option or mode is unknown, or the recompile limit is reached.
        BudgetError: if the budget cannot be read.
        SolverError: if the solver does not exist or cannot be loaded.
        PartitionError, CaptureError, ExecutionError: if the partitioner, the capture or the
            executor does not.
    """
    try:
        if mode is not None:
            raise RematError(f"mode={mode!r}: the back end 'remat' has no modes; leave it out")
        if is_last_compilation():
            raise RematError(
                "with one more shape or setting TorchDynamo would reach its recompile limit and "
                "run the rest without a plan; raise torch._dynamo.config.recompile_limit, or use "
                "remat.rematerialize, which has none"
            )
        alike = _alike(options)
        dynamo_graph = graph_in_frame(graph, alike.step().frames)
        return SharedRegion(dynamo_graph, lambda: alike.step().sessions)
    except RematError as error:
        raise let_through(error) from error.__cause__


def _log_plan(plan: object) -> None:
    logger.info("%s", plan)


def _call_begins(call: object) -> Callable[[Any, Any, list[str]], None]:
    before = _times_met(call)

    def ended(returned: Any, arguments: Any, breaks: list[str]) -> None:
        """See what a call returned; tell once of one of which nothing was planned."""
        for step in _steps_of(call):
            step.sessions.read_kept_outputs(returned)
        if call in _warned or not torch.is_grad_enabled() or _times_met(call) != before:
            return
        if is_computed(returned, arguments):
            _warned.add(call)
            reasons = "; ".join(breaks) or "TORCH_LOGS=graph_breaks says why"
            warnings.warn(
                f"what was compiled ran as it is, without a plan or a budget: TorchDynamo made no "
                f"graph of it that could be planned ({reasons}). remat.rematerialize plans for the "
                f"modules within where it can, and refuses the rest",
                BudgetWarning,
                stacklevel=4,
            )

    return ended


def _times_met(call: object) -> int:
    """Count the calls of regions of a `torch.compile` that had something to train."""
    return sum(step.sessions.times_met() for step in _steps_of(call))


def _steps_of(call: object) -> list[_Step]:
    return [alike.steps[call] for alike in _compiled if call in alike.steps]


def _reset() -> None:
    for alike in _compiled:
        for step in alike.steps.values():
            step.sessions.stop_recording()
    _compiled.clear()


remat_backend.reset = _reset  # type: ignore[attr-defined]
watch_calls(remat_backend, _call_begins)


def _alike(options: Mapping[str, Any] | None) -> _Alike:
    """Find what was compiled with these options."""
    alike = next((alike for alike in _compiled if alike.options == options), None)
    if alike is None:
        chosen = dict(options or {})
        unknown = sorted(chosen.keys() - {*OPTIONS})
        if unknown:
            raise RematError(
                f"unknown options {', '.join(map(repr, unknown))} of the back end 'remat'; "
                f"there are {', '.join(OPTIONS)}"
            )
        on_plan = chosen.pop("on_plan", None)
        if on_plan is not None and not callable(on_plan):
            raise RematError(f"on_plan={on_plan!r} cannot be called; give a function of a plan")
        alike = _Alike(options, Settings.read(**chosen), on_plan or _log_plan)
        _compiled.append(alike)
    return alike
