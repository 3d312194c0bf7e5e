"""Solvers by name, found through the entry-point group `remat.solvers`.

Listing imports nothing, so a broken plugin never breaks it; a solver is loaded when first asked for
and kept. A name offered twice is an error that names both distributions.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from remat_solvers.errors import BrokenSolver, DuplicateSolver, UnknownSolver
from remat_solvers.problem import Solver

__all__ = ["GROUP", "SolverInfo", "get_solver", "list_solvers", "origin"]

GROUP = "remat.solvers"


@dataclass(frozen=True, slots=True)
class SolverInfo:
    """Where a solver comes from: its entry point and the distribution that declares it."""

    name: str
    target: str
    distribution: str
    version: str

    @property
    def origin(self) -> str:
        """Distribution, version and entry point, for messages."""
        return f"{self.distribution} {self.version} ({self.target})"


def list_solvers() -> dict[str, SolverInfo]:
    """List all installed solvers by name, without importing any.

    Raises:
        DuplicateSolver: if two distributions offer the same name.
    """
    return {name: _info(_only(name, points)) for name, points in sorted(_by_name().items())}


def get_solver(name: str) -> Solver:
    """Load a solver.

    Raises:
        UnknownSolver: if none has this name.
        DuplicateSolver: if two distributions offer it.
        BrokenSolver: if it cannot be imported or made, or is no solver.
    """
    points = _by_name()
    if name not in points:
        close = difflib.get_close_matches(name, points, n=3)
        raise UnknownSolver(name, sorted(points), close)
    return _load(_only(name, points[name]))


def origin(name: str) -> str:
    """Name the distribution, version and entry point of an installed solver.

    Raises:
        UnknownSolver: if none has this name.
        DuplicateSolver: if two distributions offer it.
    """
    points = _by_name()
    if name not in points:
        raise UnknownSolver(name, sorted(points), [])
    return _info(_only(name, points[name])).origin


def _by_name() -> dict[str, list[EntryPoint]]:
    """Group the entry points; the same one seen twice on the path counts once."""
    found: dict[str, list[EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        same = found.setdefault(point.name, [])
        if all(_info(point) != _info(other) for other in same):
            same.append(point)
    return found


def _only(name: str, points: list[EntryPoint]) -> EntryPoint:
    if len(points) > 1:
        raise DuplicateSolver(name, [_info(point).origin for point in points])
    return points[0]


def _info(point: EntryPoint) -> SolverInfo:
    dist = point.dist
    return SolverInfo(
        name=point.name,
        target=point.value,
        distribution="an unknown distribution" if dist is None else dist.name,
        version="" if dist is None else dist.version,
    )


@functools.cache
def _load(point: EntryPoint) -> Solver:
    info = _info(point)
    try:
        solver = point.load()()
    except Exception as error:
        cause = f"it does not load ({type(error).__name__}: {error})"
        raise BrokenSolver(info.name, info.origin, cause) from error
    missing = [
        attribute
        for attribute in ("name", "exact", "needs_hierarchy", "can_solve", "solve")
        if not hasattr(solver, attribute)
    ]
    if missing:
        raise BrokenSolver(info.name, info.origin, f"it has no {', '.join(missing)}")
    found: Solver = solver
    return found
