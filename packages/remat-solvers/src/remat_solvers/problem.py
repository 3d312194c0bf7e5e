"""What a solver is given and what it may say: problem, limit, progress, and the solver protocol."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from remat_graph import Graph, Hierarchy, Schedule, Solution
from remat_solvers.errors import InvalidProblem

__all__ = ["Limit", "Problem", "Progress", "Report", "Solver", "silent"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A graph to be scheduled within `budget_bytes`; `hierarchy` for solvers that cut first.

    `executor` is where a solver may run independent sub-problems (`parallel.run_all`); `None` is
    here. The caller owns it: a solver never shuts it down. `start` is a schedule to begin with,
    which a solver may use; it need not fit.

    Raises:
        InvalidProblem: if the budget is not a positive whole number of bytes, or the hierarchy is
            of another graph.
    """

    graph: Graph
    budget_bytes: int
    hierarchy: Hierarchy | None = None
    executor: Executor | None = field(default=None, compare=False, repr=False)
    start: Schedule | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        budget = self.budget_bytes
        if isinstance(budget, bool) or not isinstance(budget, int):
            raise InvalidProblem(
                f"budget_bytes={budget!r} is a {type(budget).__name__}; "
                f"it must be a whole number of bytes, such as 8 * 2**30"
            )
        if budget <= 0:
            raise InvalidProblem(f"budget_bytes={budget}; it must be 1 or more")
        if self.hierarchy is not None and self.hierarchy.graph != self.graph:
            raise InvalidProblem("the hierarchy was made of another graph; partition this one")


@dataclass(frozen=True, slots=True)
class Limit:
    """Wall-clock time a solver may take, counted from `started` (of `time.perf_counter`).

    `seconds=None` leaves it to the solver.

    Raises:
        InvalidProblem: if `seconds` is negative or not a number.
    """

    seconds: float | None
    started: float

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds >= 0:
            raise InvalidProblem(f"limit_seconds={self.seconds}; it must be 0 or more, or None")

    @classmethod
    def starting_now(cls, seconds: float | None) -> Limit:
        """Start the clock."""
        return cls(seconds, time.perf_counter())

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
    """How far a solver is: the best schedule so far, and what no schedule can beat.

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
    whose `needs_hierarchy` is true is only asked about problems that have one. An attribute
    `citation` is what `cite` gives; there need not be one.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    needs_hierarchy: ClassVar[bool]

    def can_solve(self, problem: Problem) -> str | None:
        """Say why not, or return `None`; asked before work, so it must be quick."""
        ...

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Find a schedule; one with a schedule must be within the budget."""
        ...
