"""What runs the steps of code that is compiled together: a session for each thread in a step.

A step belongs to the thread that runs its forwards, and so do its budget and its record. A thread
goes on with the session that it had, else takes one whose step is over, else has a new one, which
plans for itself. What Dynamo compiled serves them all.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from remat.dynamo import DynamoGraph
from remat.dynamo.checkpoints import with_checkpoints_of_eager
from remat.dynamo.inner_gradients import AskedInputs
from remat.dynamo.modes import Modes
from remat.dynamo.parts import GraphParts
from remat.dynamo.written_inputs import WrittenInputs
from remat.errors import BudgetWarning
from remat.planning.user_plan import PlanOrSchedule
from remat.session.backwards import within_backward
from remat.session.counters import Counters
from remat.session.cuts import Cuts
from remat.session.region import Region, name_of, run_as_it_is
from remat.session.session import Session
from remat_graph.torch import own_thread

__all__ = ["Sessions", "SharedRegion"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SharedRegion:
    """A graph that Dynamo found, or a part of one: a region of whichever session runs it.

    That is found by `sessions`.
    """

    dynamo_graph: DynamoGraph
    sessions: Callable[[], Sessions]
    is_part: bool = False
    written: WrittenInputs = field(default_factory=WrittenInputs, init=False)
    asked: AskedInputs = field(init=False)
    _modes: Modes = field(init=False)
    counters: Counters = field(init=False)
    _name: str = field(init=False)
    _cut_at: frozenset[int] | None = field(default=None, init=False)
    _parts: GraphParts | None = field(default=None, init=False)
    _regions: list[SharedRegion] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if not self.is_part:
            graph = self.dynamo_graph
            self.written = WrittenInputs.of(graph.graph, whole=graph.whole)
        self.asked = AskedInputs(self.dynamo_graph.graph)
        self._modes = Modes(self.dynamo_graph.graph)
        self.counters = Counters(self.dynamo_graph.graph)
        self._name = name_of(self.dynamo_graph)
        sessions = self.sessions()
        self._cut(sessions)
        if torch.is_grad_enabled():
            with sessions.region_of(self):  # what is wrong is said when it is compiled
                pass

    @functools.cached_property
    def _eager(self) -> torch.fx.GraphModule:
        return with_checkpoints_of_eager(self.dynamo_graph.graph)

    def __call__(self, *inputs: Any) -> Any:
        """Run the region, as Dynamo calls it; as it is in a thread that only evaluates."""
        outputs = self.written.put(self._run(*inputs), inputs)
        self._modes.leave()
        return outputs

    def _run(self, *inputs: Any) -> Any:
        sessions = self.sessions()
        if not torch.is_grad_enabled() and not sessions.has_own():
            return run_as_it_is(self._eager, self.counters, self.counters.with_numbers(inputs))
        parts = self._cut(sessions) if torch.is_grad_enabled() else None
        if parts is not None:
            inputs = tuple(self.counters.with_numbers(inputs))
            returned = parts.run(self._regions_of(parts), inputs)
            return self.counters.put_back(returned, inputs)
        with sessions.region_of(self) as (session, region):
            refusal = self._modes.refusal or self.asked.refusal(inputs)
            if refusal is None or region.runs_as_it_is:
                return session.call(region, inputs)
            reason = f"{region.name} runs as it is: {refusal}"
            if reason not in session.breaks:  # it comes in each step
                session.breaks.append(reason)
            region.runs_as_it_is = True
            try:
                return session.call(region, inputs)
            finally:
                region.runs_as_it_is = False

    def split(self, cuts: Cuts, outputs: frozenset[int]) -> bool:
        """Have a region end where each of these outputs is there, from the next call on.

        So autograd sees their whole gradients. Gives whether the graph can be cut there.
        """
        graph = self.dynamo_graph.graph
        return self._parts is not None or cuts.add(self._name, graph, outputs)

    def _cut(self, sessions: Sessions) -> GraphParts | None:
        """Cut the region as those of its name are; give its parts, if it has several."""
        outputs = sessions.cuts.outputs.get(self._name)
        if self._parts is None and outputs != self._cut_at:
            self._cut_at = outputs
            self._parts = sessions.cuts.parts_of(self._name, self.dynamo_graph.graph)
        return self._parts

    def _regions_of(self, parts: GraphParts) -> list[SharedRegion]:
        """Give the regions of the parts, made in the first call; graphs of other sizes follow."""
        if not self._regions:
            name = self.dynamo_graph.name
            reason = f"the gradient was asked for of an output of {name} that it reads itself"
            self._regions = [
                SharedRegion(
                    DynamoGraph(part.graph, f"part {at} of {name}", reason, whole=False),
                    self.sessions,
                    is_part=True,
                )
                for at, part in enumerate(parts.parts)
            ]
        return self._regions


@dataclass(eq=False)
class _Held:
    """A session, the thread that it is of, and how often that is within a forward of it."""

    session: Session
    thread: threading.Thread
    within: int = 0
    regions: WeakKeyDictionary[SharedRegion, Region] = field(default_factory=WeakKeyDictionary)

    @property
    def is_free(self) -> bool:
        """Whether its step is over, as far as can be seen; only its thread ends its recording."""
        if self.within or self.session.step.live:
            return False
        return not (self.session.step.recording.under_way and self.thread.is_alive())


class Sessions:
    """The sessions of what is compiled together, each made by `make`; all cut regions alike."""

    def __init__(
        self, make: Callable[[Cuts], Session], user_plan: PlanOrSchedule | None = None
    ) -> None:
        self._make = make
        self.cuts = Cuts(user_plan)
        self._lock = threading.Lock()
        self._all: list[_Held] = []
        self._last: _Held | None = None

    @contextmanager
    def taken(self) -> Iterator[Session]:
        """Give the session of this thread, which no other takes before the end of the block.

        Warns:
            BudgetWarning: if another thread is within a step at the same time, for the first time.
        """
        with self._hold() as held:
            yield held.session

    @contextmanager
    def region_of(self, shared: SharedRegion) -> Iterator[tuple[Session, Region]]:
        """Give this thread's session, and the region that a graph is in it."""
        with self._hold() as held:
            region = held.regions.get(shared)
            if region is None:
                region = held.session.add(shared.dynamo_graph, shared.counters)
                if shared.written.refusal is not None:
                    why = shared.written.refusal
                    logger.warning(
                        "%s runs as it is, its memory is not planned: %s", region.name, why
                    )
                    held.session.leave(region, why)
                region.split = functools.partial(_split, weakref.ref(shared), self.cuts)
                held.regions[shared] = region
            yield held.session, region

    @contextmanager
    def _hold(self) -> Iterator[_Held]:
        with self._lock:
            held, is_second = self._find()
            held.within += 1
        try:
            if is_second:
                warnings.warn(
                    "two threads run steps of one model at the same time: each step has the budget "
                    "for itself. Gradients are right",
                    BudgetWarning,
                    stacklevel=2,
                )
            yield held
        finally:
            with self._lock:
                held.within -= 1

    def _find(self) -> tuple[_Held, bool]:
        """Find what this thread has, or is to have; say whether that is the second there is."""
        own = self._own()
        if own is None:
            thread = own_thread()
            own = next((held for held in self._all if held.is_free), None)
            if own is None:
                own = _Held(self._make(self.cuts), thread)
                self._all.append(own)
                self._last = own
                return own, len(self._all) == 2
            own.thread = thread
        self._last = own
        return own, False

    def _own(self) -> _Held | None:
        """Find what this thread has; in a backward, in a thread of autograd's own, what ran last.

        There a checkpoint computes again, or a function of the user's.
        """
        thread = own_thread()
        own = next((held for held in self._all if held.thread is thread), None)
        return self._last if own is None and within_backward() else own

    def has_own(self) -> bool:
        """Whether this thread has a session."""
        return self._own() is not None

    def times_met(self) -> int:
        """Count the calls of regions in this thread that had something to differentiate."""
        own = self._own()
        return 0 if own is None else own.session.times_met

    def read_kept_outputs(self, returned: Any) -> None:
        """Read the waiting outputs of this thread's calls that are kept, and not returned."""
        if (own := self._own()) is not None:
            step = own.session.step
            step.outputs.read_kept(step.live, returned)

    def rest(self) -> None:
        """See a forward of this thread without gradients, between two steps."""
        if (own := self._own()) is not None:
            own.session.step.rest()

    def stop_recording(self) -> None:
        """Drop what is recorded; not within a backward: torch's profiler cannot stop there."""
        if not within_backward():
            for held in self._all:
                held.session.step.stop_recording()

    def thread_of(self, session: Session) -> threading.Thread | None:
        """Give the thread that a session is of, if it is one of these."""
        return next((held.thread for held in self._all if held.session is session), None)

    def waiting(self, thread: threading.Thread) -> int:
        """Count the calls of a thread that wait for their backward."""
        return sum(len(held.session.step.live) for held in self._all if held.thread is thread)


def _split(ref: weakref.ref[SharedRegion], cuts: Cuts, outputs: frozenset[int]) -> bool:
    shared = ref()
    return shared is not None and shared.split(cuts, outputs)
