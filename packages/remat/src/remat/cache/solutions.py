"""Solutions: a folder for each graph, solver and limit, in it a file for each budget.

Ops and values are named by their position, so that a graph of other names finds them. A solution
for a larger budget whose schedule fits is as good: what was proved at the larger holds. One for a
smaller budget is taken if nothing can be faster by more than half a percent, by what is proved
without a budget or for larger ones; it says what it was made for.
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
    Status,
    decode,
    encode,
    simulate,
)
from remat_partition import Partitioner
from remat_solvers import Solver

__all__ = ["cached_solution", "keep_solution"]

logger = logging.getLogger(__name__)

_MOST_TRIED = 4  # larger budgets, and smaller ones
_NEAR = 1.005  # times what is proved, for a solution of a smaller budget


def cached_solution(
    graph: Graph,
    target: int,
    solver: str | Solver,
    limit_seconds: float | None,
    partitioner: str | Partitioner | None = None,
) -> Solution | None:
    """Find a solution within `target` bytes that was found before; `None` without one."""
    store = Store.here()
    if store is None:
        return None
    start = time.perf_counter()
    key = solution_key(graph, solver, limit_seconds, partitioner)
    if key is None:
        return None
    folder = store.folder / "solutions" / file_name(key)
    sizes = _sizes(folder)
    bound = graph.least_time or 0.0
    larger = [size for size in sizes if size >= target][:_MOST_TRIED]
    smaller = [size for size in reversed(sizes) if size < target][:_MOST_TRIED]
    for size in (*larger, *smaller):
        path = folder / f"{size}.json"
        raw = store.read(path, {**key, "budget": str(size)}, msgspec.Raw)
        solution = None if raw is None else _read(store, path, bytes(raw), graph)
        if solution is None:
            continue
        if size >= target:
            bound = max(bound, solution.lower_bound or 0.0)
        elif solution.time > _NEAR * bound:
            continue
        else:
            solution = _of_smaller(solution, size, bound)
        if solution.peak_bytes <= target:
            store.used(path)
            logger.info("the solution for %d bytes is that of %s", target, path)
            return replace(solution, solve_seconds=time.perf_counter() - start)
    return None


def _of_smaller(solution: Solution, size: int, bound: float) -> Solution:
    """Note on a solution that it was found for a smaller budget, and what is proved here."""
    return replace(
        solution,
        status=Status.OPTIMAL if solution.time <= bound else Status.FEASIBLE,
        lower_bound=min(bound, solution.time),
        solver=f"{solution.solver} for {size:,} bytes",
        trials=(),
    )


def keep_solution(
    graph: Graph,
    target: int,
    solver: str | Solver,
    limit_seconds: float | None,
    solution: Solution,
    partitioner: str | Partitioner | None = None,
) -> None:
    """Keep a solution for later processes, unless it is not known all that it depends on.

    Nor is one in doubt kept: another process may prove more.
    """
    store = Store.here()
    if store is None or solution.schedule is None or solution.doubt is not None:
        return
    key = solution_key(graph, solver, limit_seconds, partitioner)
    if key is None:
        return
    path = store.folder / "solutions" / file_name(key) / f"{target}.json"
    ops = {op.name: f"o{index}" for index, op in enumerate(graph.ops)}
    values = {name: f"v{index}" for index, name in enumerate(_made(graph))}
    renamed = _renamed(solution.schedule, ops.__getitem__, values.__getitem__)
    data = encode(replace(solution, schedule=renamed)).strip()
    store.write(path, {**key, "budget": str(target)}, msgspec.Raw(data))


def _sizes(folder: Path) -> list[int]:
    try:
        stems = [path.stem for path in folder.glob("*.json")]
    except OSError as error:
        logger.warning("the cache cannot be read: %s; REMAT_CACHE names another folder", error)
        return []
    return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit())


def _read(store: Store, path: Path, data: bytes, graph: Graph) -> Solution | None:
    """Translate a solution into the names of a graph, and judge it there."""
    ops, values = [op.name for op in graph.ops], _made(graph)
    try:
        solution = decode(data, source="the solution")
        if not isinstance(solution, Solution) or solution.schedule is None:
            raise ValueError("it holds no schedule")
        schedule = _renamed(
            solution.schedule,
            lambda name: ops[_position(name)],
            lambda name: values[_position(name)],
        )
        timeline = simulate(graph, schedule)
        if solution.lower_bound is not None and solution.lower_bound > timeline.time * (1 + 1e-9):
            raise ValueError("its bound is above its time")
    except (*DAMAGE, GraphError, IndexError) as error:
        store.refuse(path, error)
        return None
    return replace(solution, schedule=schedule, time=timeline.time, peak_bytes=timeline.peak_bytes)


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
