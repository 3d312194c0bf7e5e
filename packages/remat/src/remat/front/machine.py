"""What plans and compiles for one rematerialized model, as long as no hook or class changes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import torch

from remat.budgets.auto import AutoBudget
from remat.dynamo import Across, compile_frames
from remat.planning.settings import Settings
from remat.session.cuts import Cuts
from remat.session.session import Session
from remat.session.threads import Sessions, SharedRegion
from remat_graph.torch import draws_otherwise

__all__ = ["Machine", "new_machine"]

_OTHER_DRAWS = (
    "an RNN on CUDA with dropout= between its layers runs as it is, its memory is not planned: "
    "cuDNN draws that dropout from a stream of its own, and no trace draws the same"
)

Machine: TypeAlias = tuple[Sessions, Callable[[Any, Hashable], Callable[..., Any]]]
"""The sessions, and what gives a function with its graphs run by them, for some hooks."""


def new_machine(
    model: torch.nn.Module, settings: Settings, across: Across, *, one_region: bool
) -> Machine:
    """Make what does not hold the model: Dynamo holds it, by the code of the forward.

    `one_region` says that a forward which is one graph has the whole budget. `across` is told of
    gradients that the forward asks for across breaks.
    """
    module = weakref.ref(model)

    def set_plan(plan: Any) -> None:
        vars(module())["plan"] = plan

    def held() -> torch.nn.Module:
        there = module()
        return torch.nn.Module() if there is None else there

    breaks: list[str] = []

    def new_session(cuts: Cuts) -> Session:
        auto = AutoBudget(settings.optimizer, lambda: held().parameters())
        session = Session(settings, set_plan, auto, cuts, one_region=one_region, model=held)
        session.breaks.extend(breaks)
        return session

    sessions = Sessions(new_session, settings.user_plan)
    weakref.finalize(model, _stop_recording, weakref.ref(sessions)).atexit = False

    def allow_rnn() -> bool:
        try:
            if not draws_otherwise(held()):
                return True
        except AttributeError:  # a layer that the forward has made is there, and has nothing yet
            return True
        if _OTHER_DRAWS not in breaks:
            breaks.append(_OTHER_DRAWS)
            with sessions.taken() as session:
                session.breaks.append(_OTHER_DRAWS)
        return False

    def skipped(reason: str) -> None:
        breaks.append(reason)
        with sessions.taken() as session:
            session.runs_as_it_is(reason)

    @functools.cache
    def compiled(function: Callable[..., Any], hooks: Hashable) -> Callable[..., Any]:
        return compile_frames(
            function,
            lambda graph, _: SharedRegion(graph, lambda: sessions),
            skipped,
            across=across,
            allow_rnn=allow_rnn,
            model=module(),
            watched=None if hooks is None else module(),
        )

    return sessions, compiled


def _stop_recording(sessions: weakref.ref[Sessions]) -> None:
    """End what is recorded for a model that is gone, if Dynamo still holds its sessions."""
    held = sessions()
    if held is not None:
        held.stop_recording()
