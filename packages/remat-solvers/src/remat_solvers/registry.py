"""Solvers by name, found through the entry-point group `remat.solvers`.

Listing imports nothing, so a broken plugin never breaks it; a solver is loaded when first asked for
and kept. A name offered twice is an error that names both distributions.
"""

from __future__ import annotations

import difflib
import functools

from remat_graph.plugins import Plugin, find_plugins
from remat_solvers.core.problem import Solver
from remat_solvers.errors import BrokenSolver, DuplicateSolver, InvalidProblem, UnknownSolver

__all__ = ["GROUP", "cite", "find", "get_solver", "list_solvers"]

GROUP = "remat.solvers"


def list_solvers() -> dict[str, Plugin]:
    """List the installed solvers by name, without importing any.

    Raises:
        DuplicateSolver: if two distributions offer the same name.
    """
    return {name: _only(name, plugins) for name, plugins in find_plugins(GROUP).items()}


def get_solver(name: str) -> Solver:
    """Load a solver; the same object every time.

    Raises:
        InvalidProblem: if this is no name.
        UnknownSolver: if none has this name.
        DuplicateSolver: if two distributions offer it.
        BrokenSolver: if it cannot be imported or made, or is no solver.
    """
    return _make(find(name))


def cite(name: str) -> str:
    """Cite the method of a solver: authors, title, where; or say that its distribution names none.

    Raises:
        InvalidProblem, UnknownSolver, DuplicateSolver, BrokenSolver: as `get_solver`.
    """
    citation = getattr(get_solver(name), "citation", None)
    if isinstance(citation, str) and citation.strip():
        return citation
    return f"solver {name!r} names no source; cite what {find(name).origin} is described in"


def find(name: str) -> Plugin:
    """Find the one solver of a name, without importing it; errors as `get_solver`."""
    if not isinstance(name, str):
        raise InvalidProblem(f"solver={name!r}; give a name, such as 'refine'")
    plugins = find_plugins(GROUP)
    if name not in plugins:
        close = difflib.get_close_matches(name, plugins, n=3)
        raise UnknownSolver(name, list(plugins), close)
    return _only(name, plugins[name])


def _only(name: str, plugins: tuple[Plugin, ...]) -> Plugin:
    if len(plugins) > 1:
        raise DuplicateSolver(name, [plugin.origin for plugin in plugins])
    return plugins[0]


@functools.cache
def _make(plugin: Plugin) -> Solver:
    try:
        solver = plugin.load()()  # type: ignore[operator]
    except Exception as error:
        cause = f"it does not load ({type(error).__name__}: {error})"
        raise BrokenSolver(plugin.name, plugin.origin, cause) from error
    missing = [
        attribute
        for attribute in ("name", "exact", "needs_hierarchy", "can_solve", "solve")
        if not hasattr(solver, attribute)
    ]
    if missing:
        raise BrokenSolver(plugin.name, plugin.origin, f"it has no {', '.join(missing)}")
    found: Solver = solver
    return found
