"""Solutions: a folder for each graph, solver and limit, in it a file for each budget.

Ops and values are named by their position, so that a graph of other names finds them. A solution
for a larger budget whose schedule fits is as good: what was proved at the larger holds.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from remat.cache.keys import file_name, solution_key
from remat.cache.store import DAMAGE, Store
from remat_graph import (
    Compute,
    Free,
    Graph,
    GraphError,
    Schedule,
    Solution,
    decode,
    encode,
    simulate,
)

__all__ = ["cached_solution", "keep_solution"]

logger = logging.getLogger(__name__)

_MOST_TRIED = 4  # larger budgets


def cached_solution(
    graph: Graph, target: int, solver: str, limit_seconds: float | None
) -> Solution | None:
    """Find a solution within `target` bytes that was found before; `None` without one."""
    store = Store.here()
    if store is None:
        return None
    start = time.perf_counter()
    key = solution_key(graph, solver, limit_seconds)
    folder = store.folder / "solutions" / file_name(key)
    for size in [size for size in _sizes(folder) if size >= target][:_MOST_TRIED]:
        path = folder / f"{size}.json"
        raw = store.read(path, {**key, "budget": str(size)}, msgspec.Raw)
        solution = None if raw is None else _read(store, path, bytes(raw), graph)
        if solution is not None and solution.peak_bytes <= target:
            store.used(path)
            logger.info("the solution for %d bytes is that of %s", target, path)
            return replace(solution, solve_seconds=time.perf_counter() - start)
    return None


def keep_solution(
    graph: Graph, target: int, solver: str, limit_seconds: float | None, solution: Solution
) -> None:
    """Keep a solution for later processes."""
    store = Store.here()
    if store is None or solution.schedule is None:
        return
    key = solution_key(graph, solver, limit_seconds)
    path = store.folder / "solutions" / file_name(key) / f"{target}.json"
    ops = {op.name: f"o{index}" for index, op in enumerate(graph.ops)}
    values = {name: f"v{index}" for index, name in enumerate(_made(graph))}
    renamed = _renamed(solution.schedule, ops.__getitem__, values.__getitem__)
    data = encode(replace(solution, schedule=renamed)).strip()
    store.write(path, {**key, "budget": str(target)}, msgspec.Raw(data))


def _sizes(folder: Path) -> list[int]:
    stems = (path.stem for path in folder.glob("*.json"))
    return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit())


def _read(store: Store, path: Path, data: bytes, graph: Graph) -> Solution | None:
    """Say a solution in the names of a graph, and judge it there."""
    ops, values = [op.name for op in graph.ops], _made(graph)
    try:
        found = decode(data, source="the solution")
        if not isinstance(found, Solution) or found.schedule is None:
            raise ValueError("it holds no schedule")
        schedule = _renamed(
            found.schedule, lambda name: ops[_position(name)], lambda name: values[_position(name)]
        )
        timeline = simulate(graph, schedule)
        if found.lower_bound is not None and found.lower_bound > timeline.time * (1 + 1e-9):
            raise ValueError("its bound is above its time")
    except (*DAMAGE, GraphError, IndexError) as error:
        store.refuse(path, error)
        return None
    return replace(found, schedule=schedule, time=timeline.time, peak_bytes=timeline.peak_bytes)


def _made(graph: Graph) -> list[str]:
    return [value for op in graph.ops for value in op.outputs]


def _position(name: str) -> int:
    if not re.fullmatch("[ov][0-9]{1,9}", name):
        raise ValueError(f"{name!r} is no position")
    return int(name[1:])


def _renamed(schedule: Schedule, op: Callable[[str], str], value: Callable[[str], str]) -> Schedule:
    return Schedule(
        tuple(
            Compute(op(step.op)) if isinstance(step, Compute) else Free(value(step.value))
            for step in schedule
        )
    )
