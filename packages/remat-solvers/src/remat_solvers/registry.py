"""Solvers by name, found through the entry-point group `remat.solvers`, or as objects.

Listing imports nothing, so a broken plugin never breaks it; a solver is loaded when first asked for
and kept. A name offered twice is an error that names both distributions.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from remat_graph.plugins import Plugin, Registry, described, read_settings
from remat_solvers.core.problem import Solver
from remat_solvers.errors import BrokenSolver, DuplicateSolver, InvalidProblem, UnknownSolver

__all__ = ["GROUP", "Chosen", "cite", "get_solver", "list_solvers", "resolve_solver"]

GROUP = "remat.solvers"
_INSTALLED = Registry(GROUP, "solver", "refine", UnknownSolver, DuplicateSolver, BrokenSolver)


def list_solvers() -> dict[str, Plugin]:
    """List the installed solvers by name, without importing any.

    Raises:
        DuplicateSolver: if two distributions offer the same name.
    """
    return _INSTALLED.listed()


def get_solver(solver: str | Solver) -> Solver:
    """Load the solver of a name, the same object every time; one that is an object is handed back.

    A name may have settings, plain values: `checkmate(gap=0.01)`.

    Raises:
        InvalidProblem: if this is neither a name nor a solver, or the settings are not its own.
        UnknownSolver: if none has this name.
        DuplicateSolver: if two distributions offer it.
        BrokenSolver: if it cannot be imported or made, or is no solver.
    """
    return resolve_solver(solver).solver


def cite(solver: str | Solver) -> str:
    """Cite the method of a solver: authors, title, where; or say that its distribution names none.

    Raises:
        InvalidProblem, UnknownSolver, DuplicateSolver, BrokenSolver: as `get_solver`.
    """
    chosen = resolve_solver(solver)
    no_source = f"solver {chosen.name!r} names no source; cite what {chosen.origin} is described in"
    return chosen.solver.citation or no_source


@dataclass(frozen=True, slots=True)
class Chosen:
    """A solver as it was asked for.

    `name` is what messages and answers call it: its name, with the settings of an object where they
    are not its defaults (`checkmate(gap=0.01)`). `origin` is where it comes from. `identity` says
    all that its answers depend on, so that they may be kept; `None` if that is not known: of a
    class that no installed distribution offers, whose code may change, or of settings that cannot
    be written down.
    """

    solver: Solver
    name: str
    origin: str
    identity: str | None


def resolve_solver(solver: str | Solver) -> Chosen:
    """Find what a name stands for, or take an object with its settings; errors as `get_solver`."""
    if isinstance(solver, str):
        try:
            name, settings = read_settings(solver)
        except ValueError as error:
            raise InvalidProblem(f"solver={error}") from None
        plugin = _INSTALLED.find(name)
        if not settings:
            return Chosen(_make(plugin), plugin.name, plugin.origin, f"{plugin.name} of {plugin}")
        solver = _make_with(plugin, settings)
    if isinstance(solver, type):
        raise InvalidProblem(
            f"solver={solver.__name__}, which is a class; give an object: {solver.__name__}()"
        )
    missing = _missing(solver)
    if missing:
        lacks = f", which has no {', '.join(missing)}" if hasattr(solver, "solve") else ""
        raise InvalidProblem(
            f"solver={solver!r}{lacks}; give a name, such as 'auto' or 'refine', or a solver with "
            f"its settings, such as Checkmate(gap=0.01)"
        )
    return Chosen(solver, *described(GROUP, solver.name, solver))


def _missing(solver: object) -> list[str]:
    """List what of the protocol an object lacks."""
    required = (*inspect.get_annotations(Solver), "can_solve", "solve")
    return [attribute for attribute in required if not hasattr(solver, attribute)]


@functools.cache
def _make(plugin: Plugin) -> Solver:
    try:
        solver = plugin.load()()  # type: ignore[operator]
    except Exception as error:
        cause = f"it does not load ({type(error).__name__}: {error})"
        raise BrokenSolver(plugin.name, plugin.origin, cause) from error
    missing = _missing(solver)
    if missing:
        raise BrokenSolver(plugin.name, plugin.origin, f"it has no {', '.join(missing)}")
    loaded: Solver = solver
    return loaded


def _make_with(plugin: Plugin, settings: Mapping[str, object]) -> Solver:
    """Make a solver with settings of its own, each of the kind of its default."""
    _make(plugin)  # with its defaults: what does not load or work at all is broken
    kind = plugin.load()
    parameters = inspect.signature(kind).parameters  # type: ignore[arg-type]
    arguments: dict[str, object] = {}
    for name, value in settings.items():
        if name not in parameters:
            its = f"it has {', '.join(parameters)}" if parameters else "it has none"
            raise InvalidProblem(f"solver {plugin.name!r} has no setting {name!r}; {its}")
        try:
            arguments[name] = _like(parameters[name].default, value)
        except ValueError:
            raise InvalidProblem(
                f"setting {name!r} of solver {plugin.name!r} is {value!r}; "
                f"give a value like its default, {parameters[name].default!r}"
            ) from None
    try:
        solver: Solver = kind(**arguments)  # type: ignore[operator]
    except (TypeError, ValueError) as error:
        raise InvalidProblem(f"solver {plugin.name!r} cannot be made so: {error}") from error
    return solver


def _like(default: object, value: object) -> object:
    """Make a plain value one of the kind of a default.

    Raises:
        ValueError: if it cannot be one.
    """
    if default is None or default is inspect.Parameter.empty:
        return value
    if isinstance(default, enum.Enum):
        members = {f"{type(default).__name__}.{each.name}": each for each in type(default)}
        if str(value) not in members:
            raise ValueError
        return members[str(value)]
    if isinstance(default, tuple) and isinstance(value, list | tuple):
        return tuple(value)
    kinds = (int, float) if isinstance(default, float) else type(default)
    if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
        raise ValueError
    return value
