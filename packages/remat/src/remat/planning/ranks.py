"""One plan for all ranks: the first that has one hands its schedules to the others.

The store of the process group holds them, under the graphs, the budget that was asked for, and how
many plans were made for these before. Nobody waits for another's plan: a rank that comes first
writes, one that comes later reads, and takes what it reads if that fits there and is not much
slower. A collective would have to be called by all ranks at once, and planning is not: one may meet
a new length while the others run by known plans.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch

from remat.planning.slices import whole_programs
from remat.plans.outlines import Outline
from remat_graph import Graph, Schedule, Solution, Status, decode, encode, simulate
from remat_graph.torch import Capture

__all__ = [
    "MOST_TIMES",
    "Choice",
    "has_other_ranks",
    "of_first_rank",
    "with_schedule_of_first_rank",
]

logger = logging.getLogger(__name__)

Choice = tuple[int, Schedule]
"""A graph, by its position among several, and a schedule of it."""

MOST_TIMES = 1.05  # of the time of this rank's own plan, for another's to be taken

_MOST_BYTES = 4 * 2**20  # a store hangs up on who sends twice as much
_WAIT_SECONDS = 10.0  # for a store that answers in milliseconds, or is gone


@dataclass(slots=True)
class _GroupState:
    """How many plans a group has shared under each key, and whether its store answers."""

    plans: Counter[str] = field(default_factory=Counter)
    answers: bool = True


_states: WeakKeyDictionary[Any, _GroupState] = WeakKeyDictionary()


def has_other_ranks() -> bool:
    """Whether this process is one of several in a process group."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1


def of_first_rank(
    asked: str, graphs: Sequence[Graph], chosen: Sequence[Choice]
) -> Sequence[Choice]:
    """Give what the first rank chose for graphs of these outlines, in the names used here.

    `asked` is what it was asked for besides, in the same words on all ranks. What was chosen here
    is given back where no other rank was first, or none can be asked.
    """
    state = _group_state()
    if state is None or not state.answers:
        return chosen
    try:
        outlines = [Outline.of(graph) for graph in graphs]
        mine = _written(outlines, chosen)
        if len(mine) > _MOST_BYTES:
            raise ValueError(f"it takes {len(mine):,} bytes")
        text = json.dumps([asked, *(outline.hash for outline in outlines)])
        key = hashlib.sha256(text.encode()).hexdigest()
        state.plans[key] += 1
        first = _first(f"remat/{key}/{state.plans[key]}", mine)
        theirs = chosen if first == mine.encode() else _read(outlines, first)
        for position, schedule in theirs:
            simulate(graphs[position], schedule)
    except Exception as error:  # whatever it is, this rank has a plan
        state.answers = not isinstance(error, TimeoutError)
        reason = str(error).partition("\n")[0] or type(error).__name__
        logger.warning("this plan is not shared with other ranks: %s", reason)
        return chosen
    return theirs


def with_schedule_of_first_rank(
    offered: Capture,
    captured: Capture,
    solution: Solution,
    schedule: Schedule,
    asked: str,
    target: int,
) -> tuple[Capture, Solution]:
    """Take the schedule of the rank that had one first, and its layouts, if it is as good here.

    `captured` is `offered`, or the same in the layouts that were traced. What was proved here holds
    of it, too.
    """
    captures = whole_programs(offered)
    graphs = [each.graph for each in captures]
    if captured.graph in graphs:
        mine = graphs.index(captured.graph)
    else:
        mine = len(captures)
        captures.append(captured)
    graphs = [each.graph for each in captures]
    ((which, theirs),) = of_first_rank(asked, graphs, [(mine, schedule)])
    timeline = simulate(graphs[which], theirs)
    is_own = (which, theirs) == (mine, schedule)
    if is_own or timeline.peak_bytes > target or timeline.time > MOST_TIMES * solution.time:
        return captured, solution
    bound = solution.lower_bound
    return captures[which], replace(
        solution,
        schedule=theirs,
        status=Status.FEASIBLE,
        peak_bytes=timeline.peak_bytes,
        time=timeline.time,
        lower_bound=None if bound is None else min(bound, timeline.time),
        solver="another rank",
        trials=(),
    )


def _group_state() -> _GroupState | None:
    if not has_other_ranks():
        return None
    return _states.setdefault(torch.distributed.group.WORLD, _GroupState())


def _first(key: str, mine: str) -> bytes:
    """Give what a store holds under a key: `mine`, if nobody wrote before.

    It is asked by a connection and a thread of its own: `compare_set` of TCPStore takes no limit,
    and waits for whoever else waits by the same connection.

    Raises:
        TimeoutError: if there is no answer.
        RuntimeError: if it is gone, or cannot compare.
    """
    answer: Future[bytes] = Future()

    def ask() -> None:
        try:
            answer.set_result(_store().clone().compare_set(key, "", mine))
        except Exception as error:
            answer.set_exception(error)

    Thread(target=ask, name="remat-store", daemon=True).start()
    try:
        return answer.result(_WAIT_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"their store was silent for {_WAIT_SECONDS:.0f} s") from None


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _written(outlines: Sequence[Outline], chosen: Sequence[Choice]) -> str:
    """Write schedules as documents, in the names of outlines."""
    documents = []
    for which, schedule in chosen:
        outline = outlines[which]
        documents.append([which, encode(outline.translate(schedule, outline.nameless)).decode()])
    return base64.b85encode(zlib.compress(json.dumps(documents).encode())).decode()


def _read(outlines: Sequence[Outline], data: bytes) -> list[Choice]:
    """Read what another rank wrote.

    Raises:
        ValueError, TypeError, LookupError, zlib.error, DocumentError: if it reads otherwise.
    """
    chosen = []
    for which, document in json.loads(zlib.decompress(base64.b85decode(data))):
        outline, schedule = outlines[which], decode(document.encode())
        if not isinstance(schedule, Schedule):
            raise TypeError("it is no schedule")
        chosen.append((which, outline.nameless.translate(schedule, outline)))
    return chosen
