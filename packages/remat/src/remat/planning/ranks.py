"""One plan for all ranks: the first that has one hands its schedules to the others.

The store of the process group holds them, under the graphs, the budget that was asked for, and how
many plans were made for these before. Nobody waits: a rank that comes first writes, one that comes
later reads, and takes what it reads if that fits there. A collective would have to be called by all
ranks at once, and planning is not: one may meet a new length while the others run by known plans.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from remat.plans.outlines import Outline
from remat_graph import Compute, Free, Graph, InvalidSchedule, Schedule, simulate

__all__ = ["Choice", "has_other_ranks", "of_first_rank"]

logger = logging.getLogger(__name__)

Choice = tuple[int, Schedule]
"""A graph, by its position among several, and a schedule of it."""

_MOST_BYTES = 4 * 2**20  # a store hangs up on who sends twice as much

_DAMAGE = (ValueError, TypeError, LookupError, zlib.error, InvalidSchedule)

_made: Counter[str] = Counter()


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
    if not has_other_ranks():
        return chosen
    outlines = [Outline.of(graph) for graph in graphs]
    told = json.dumps([asked, *(outline.hash for outline in outlines)])
    key = hashlib.sha256(told.encode()).hexdigest()
    number = _made[key]
    _made[key] += 1
    mine = _written(outlines, chosen)
    if len(mine) > _MOST_BYTES:
        logger.warning("a plan of %s bytes is not told to other ranks", f"{len(mine):,}")
        return chosen
    try:
        found = _store().compare_set(f"remat/{key}/{number}", "", mine)
        theirs = chosen if found == mine.encode() else _read(outlines, found)
        for position, schedule in theirs:
            simulate(graphs[position], schedule)
    except (*_DAMAGE, RuntimeError) as error:  # the latter of stores that cannot, or are gone
        logger.warning("no plan is shared with other ranks: %s", str(error).partition("\n")[0])
        return chosen
    return theirs


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _written(outlines: Sequence[Outline], chosen: Sequence[Choice]) -> str:
    """Write schedules by positions in outlines: of an op, or below zero of what is freed."""
    ops = [{name: at for at, name in enumerate(outline.ops)} for outline in outlines]
    values = [{name: ~at for at, name in enumerate(outline.values)} for outline in outlines]
    steps = [
        [
            ops[which][step.op] if isinstance(step, Compute) else values[which][step.value]
            for step in schedule
        ]
        for which, schedule in chosen
    ]
    text = json.dumps([[which for which, _ in chosen], steps], separators=(",", ":"))
    return base64.b85encode(zlib.compress(text.encode())).decode()


def _read(outlines: Sequence[Outline], data: bytes) -> list[Choice]:
    """Read what another rank wrote.

    Raises:
        ValueError, TypeError, LookupError, zlib.error: if it reads otherwise.
    """
    graphs, schedules = json.loads(zlib.decompress(base64.b85decode(data)))
    chosen = []
    for which, positions in zip(graphs, schedules, strict=True):
        ops, values = outlines[which].ops, outlines[which].values
        steps = (Compute(ops[at]) if at >= 0 else Free(values[~at]) for at in positions)
        chosen.append((which, Schedule(tuple(steps))))
    return chosen
