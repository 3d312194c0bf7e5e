"""A folder of shared plans: `REMAT_PLANS` names one, or several as in `PATH`, that are only read.

The plan files in it, whatever they are called, say the hash of the outline of their graph; those
of the outline that is looked for are read, checked and simulated. One is taken that was made for
this budget or a larger one, and fits.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

from remat.plans.file import read_lone_head
from remat.plans.outlines import Outline
from remat.plans.plan import Plan
from remat_graph import DocumentError, Graph, Solution

__all__ = ["shared_solution"]

logger = logging.getLogger(__name__)


def shared_solution(graph: Graph, target: int, budget: int) -> Solution | None:
    """Find the fastest schedule of shared plans that takes at most `target` bytes, or `None`.

    `budget` is what a plan must have been made for at least.
    """
    heads = [(path, outline) for path, outline, its_budget in _heads() if its_budget >= budget]
    if not heads:
        return None
    here = Outline.of(graph)
    wanted = here.hash
    fitting = []
    for path, outline in heads:
        if outline == wanted:
            solution = _read(path, graph, here)
            if solution is not None and solution.peak_bytes <= target:
                logger.info("the shared plan %s serves", path)
                fitting.append(solution)
    return min(fitting, key=lambda solution: solution.time, default=None)


def _read(path: Path, graph: Graph, here: Outline) -> Solution | None:
    try:
        plan = Plan.load(path)
    except (DocumentError, OSError) as error:
        logger.warning("the shared plan %s is left out: %s", path, error)
        return None
    schedule = Outline.of(plan.graph).translate(plan.schedule, here)
    return plan.solution_on(graph, schedule)


def _heads() -> list[tuple[Path, str, int]]:
    """List the plans of one region: the outline and the budget of each."""
    folders = [Path(name) for name in os.environ.get("REMAT_PLANS", "").split(os.pathsep) if name]
    heads = []
    for folder in folders:
        if not folder.is_dir():
            logger.warning("REMAT_PLANS names %s, which is no folder", folder)
    for path in sorted(path for folder in folders for path in folder.glob("*.json")):
        try:
            head = _head(path, path.stat().st_mtime_ns)
        except (DocumentError, OSError) as error:
            logger.warning("the shared plan %s is left out: %s", path, error)
        else:
            if head is not None:
                heads.append((path, *head))
    return heads


@functools.lru_cache(maxsize=4096)
def _head(path: Path, modified: int) -> tuple[str, int] | None:
    del modified  # a file that was changed is read again
    return read_lone_head(path.read_bytes(), str(path))
