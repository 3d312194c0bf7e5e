"""What a solver is given and what it may say: problem, limit, progress, and the solver protocol."""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from remat_graph import Compute, Free, Graph, Hierarchy, Schedule, Solution
from remat_solvers.core.wiring import MOST_BYTES, Wiring, total_bytes
from remat_solvers.errors import InvalidProblem

__all__ = [
    "Limit",
    "PlainSolver",
    "Problem",
    "Progress",
    "Report",
    "Solver",
    "check_executor",
    "check_gap",
    "check_graph",
    "check_progress",
    "check_whole",
    "silent",
]

_MOST_SHOWN = 60  # characters of what is not what was asked for


@dataclass(frozen=True, slots=True)
class Problem:
    """A graph to be scheduled within `budget_bytes`; `hierarchy` for solvers that cut first.

    `executor` is where a solver may run independent sub-problems (`parallel.run_all`); `None` is
    here. The caller owns it: a solver never shuts it down. `start` is a schedule to begin with,
    which a solver may use; it need not fit.

    Raises:
        InvalidProblem: if the budget is not a positive whole number of bytes, the hierarchy is of
            another graph, one of the others is not what it should be, or the sizes of the graph add
            up to more than can be counted.
    """

    graph: Graph
    budget_bytes: int
    hierarchy: Hierarchy | None = None
    executor: Executor | None = field(default=None, compare=False, repr=False)
    start: Schedule | None = field(default=None, compare=False, repr=False)
    _wiring: Wiring | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_graph(self.graph)
        budget = self.budget_bytes
        if isinstance(budget, bool) or not isinstance(budget, int):
            raise InvalidProblem(
                f"budget_bytes={budget!r} is a {type(budget).__name__}; "
                f"it must be a whole number of bytes, such as 8 * 2**30"
            )
        if budget <= 0:
            raise InvalidProblem(f"budget_bytes={budget}; it must be 1 or more")
        if self.hierarchy is not None:
            _check_hierarchy(self.hierarchy, self.graph)
        if self.executor is not None:
            check_executor(self.executor)
        if self.start is not None:
            _check_start(self.start)

    @property
    def wiring(self) -> Wiring:
        """The graph as arrays, made when first asked for."""
        wiring = self._wiring
        if wiring is None:
            wiring = Wiring.of(self.graph)
            object.__setattr__(self, "_wiring", wiring)
        return wiring


def check_graph(graph: object) -> None:
    """Refuse what is no graph, or one whose sizes do not add up within 64 bits.

    Raises:
        InvalidProblem: as it says.
    """
    if not isinstance(graph, Graph):
        raise InvalidProblem(
            f"graph={_shown(graph)}; it must be a remat_graph.Graph, such as "
            f"remat_graph.load() reads and from_networkx() makes"
        )
    total = total_bytes(graph)
    if total > MOST_BYTES:
        raise InvalidProblem(
            f"the values of the graph and its largest workspace are {total:,} bytes together, more "
            f"than the {MOST_BYTES:,} that can be added up; give all sizes, and the budget, in a "
            f"larger unit"
        )


def check_executor(executor: object) -> None:
    """Refuse what takes no tasks.

    Raises:
        InvalidProblem: as it says.
    """
    if isinstance(executor, type) or not callable(getattr(executor, "submit", None)):
        raise InvalidProblem(
            f"executor={_shown(executor)}; it must be a concurrent.futures.Executor, such as "
            f"ProcessPoolExecutor(4), or None"
        )


def check_gap(gap: object) -> None:
    """Refuse a gap that is no number of 0 or more.

    Raises:
        InvalidProblem: as it says.
    """
    if isinstance(gap, bool) or not isinstance(gap, int | float) or not gap >= 0:
        raise InvalidProblem(f"gap={gap!r}; it must be a number, 0 or more")


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Refuse a setting that is no whole number, or below `least`.

    Raises:
        InvalidProblem: as it says.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidProblem(f"{name}={value!r}; it must be a whole number, {least} or more")


def _check_hierarchy(hierarchy: object, graph: Graph) -> None:
    if not isinstance(hierarchy, Hierarchy):
        raise InvalidProblem(
            f"hierarchy={_shown(hierarchy)}; it must be a remat_graph.Hierarchy, such as "
            f"remat_partition.partition() makes of the graph, or None"
        )
    if hierarchy.graph != graph:
        raise InvalidProblem("the hierarchy was made of another graph; partition this one")


def _check_start(start: object) -> None:
    if not isinstance(start, Schedule):
        raise InvalidProblem(
            f"start={_shown(start)}; it must be a remat_graph.Schedule, such as the schedule of a "
            f"solution, or None"
        )
    for number, step in enumerate(start.steps):
        if not isinstance(step, Compute | Free):
            raise InvalidProblem(
                f"step {number} of start is {_shown(step)}; it must be a Compute(op) or a "
                f"Free(value) of remat_graph"
            )


def check_progress(progress: object) -> None:
    """Check that what is to be called with a `Progress` can be called.

    Raises:
        InvalidProblem: if it cannot, and is not None.
    """
    if progress is not None and not callable(progress):
        raise InvalidProblem(f"progress={progress!r}; give a function of a Progress, or None")


def _shown(value: object) -> str:
    """Show something that is not what was asked for, and of which type it is."""
    text = repr(value)
    text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return f"{text} of type {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class Limit:
    """Wall-clock time a solver may take, counted from `started` (of `time.perf_counter`).

    `seconds=None` leaves it to the solver. One that is `loose` is the most that it may take: it may
    stop as soon as it gains little, as it would without a limit.

    Raises:
        InvalidProblem: if `seconds` is negative or not a number.
    """

    seconds: float | None
    started: float
    loose: bool = False

    def __post_init__(self) -> None:
        seconds = self.seconds
        is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and seconds >= 0):
            raise InvalidProblem(f"limit_seconds={seconds!r}; it must be 0 or more, or None")

    @classmethod
    def starting_now(cls, seconds: float | None, *, loose: bool = False) -> Limit:
        """Start the clock."""
        return cls(seconds, time.perf_counter(), loose)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def left(self, default_seconds: float) -> float:
        """Seconds that remain, of `default_seconds` where no limit was set; never below 0."""
        seconds = default_seconds if self.seconds is None else self.seconds
        return max(0.0, seconds - self.elapsed)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a solver is: the best schedule so far, and a lower bound on all.

    `incumbent` makes that schedule when called; `None` where there is none, or it cannot be had.
    """

    solver: str
    round: int
    incumbent_time: float | None
    incumbent_peak_bytes: int | None
    lower_bound: float | None
    seconds: float
    message: str
    incumbent: Callable[[], Schedule] | None = field(default=None, compare=False, repr=False)


class Report(Protocol):
    """Called with each `Progress`, in the thread of the solver."""

    def __call__(self, progress: Progress, /) -> None:
        """Take note; an exception stops the solver."""
        ...


def silent(_progress: Progress, /) -> None:
    """Report nothing."""


class Solver(Protocol):
    """Turns a graph and a byte budget into a schedule.

    `exact` solvers prove optimality for the order of the graph when given enough time. A solver
    whose `needs_hierarchy` is true is only asked about problems that have one, and only one whose
    `takes_alternatives` is true about graphs whose values have several implementations. `citation`
    says where the method is from (authors, title, where); it is empty if that is nowhere.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    needs_hierarchy: ClassVar[bool]
    takes_alternatives: ClassVar[bool]
    citation: ClassVar[str]

    def can_solve(self, problem: Problem) -> str | None:
        """Say why not, or return `None`; asked before work, so it must be quick."""
        ...

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Find a schedule; one with a schedule must be within the budget."""
        ...


class PlainSolver:
    """What a solver says of itself unless it says otherwise: it takes plain graphs, and no others.

    It proves no optimum, needs no hierarchy, and refuses a graph without ops.
    """

    __slots__ = ()

    exact: ClassVar[bool] = False
    needs_hierarchy: ClassVar[bool] = False
    takes_alternatives: ClassVar[bool] = False

    def can_solve(self, problem: Problem) -> str | None:
        """Take any graph that has an op."""
        return None if problem.graph.ops else "the graph has no ops"
