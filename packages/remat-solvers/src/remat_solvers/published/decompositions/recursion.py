"""What the two recursions over decompositions share: the division, the sweep, the clean-up.

Kumar et al. (NeurIPS 2019), Algorithm 1 and section 4.3. `sequences` sweeps over the limit at which
a recursion stops; `RecursionSolver` is a solver made of that.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from remat_graph import Solution
from remat_solvers.core.dead_runs import without_dead_runs
from remat_solvers.core.incumbent import Incumbent
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Report, check_whole
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.published.decompositions.decomposition import Bag, Precedence

__all__ = ["Recursion", "RecursionSolver", "playable", "sequences"]

Part = TypeVar("Part")

_DEFAULT_SECONDS = 30.0
_MOST_LENGTHS = 60


class Recursion(ABC):
    """Computes nodes of parts of a graph, divided by separators; `bags` are all there are."""

    def __init__(self, precedence: Precedence, bags: Sequence[Bag]) -> None:
        self.precedence = precedence
        self.bags = bags
        self._start(1, 0)

    @property
    def bag_count(self) -> int:
        """Number of bags of the decomposition."""
        return len(self.bags)

    @property
    def width(self) -> int:
        """One less than the size of the largest bag."""
        return max(map(len, self.bags)) - 1

    @abstractmethod
    def order(self, k: int, most: int) -> list[int] | None:
        """Order computations of all ops, the recursion stopped below `k` bags.

        `None` if there are more than `most`.
        """

    def _start(self, k: int, most: int) -> None:
        self._k = k
        self._most = most
        self._memo: dict[Hashable, list[int] | None] = {}

    def _divide(
        self,
        separator: Sequence[int],
        parts: Sequence[tuple[Part, Bag]],
        wanted: Bag,
        compute: Callable[[Part, Bag], list[int] | None],
    ) -> list[int] | None:
        """Compute a separator node by node, and with it there what else is wanted."""
        before = self.precedence.before
        order: list[int] = []
        goals: list[tuple[Bag, int | None]] = [(frozenset(before[v]), v) for v in separator]
        goals.append((wanted.difference(separator), None))
        for goal, node in goals:
            for part, members in parts:
                inner = goal & members
                if inner:
                    more = compute(part, inner)
                    if more is None or len(order) + len(more) > self._most:
                        return None
                    order.extend(more)
            if node is not None:
                order.append(node)
        return order


def playable(wiring: Wiring, order: Sequence[int]) -> Ints:
    """Leave out of an order the virtual node and what must not or need not be computed.

    Ops that are not replayable are computed the first time only; recomputations that nothing
    reads are left out. One pass each way.
    """
    seen = [False] * wiring.op_count
    legal: list[int] = []
    for op in order:
        if op < wiring.op_count and (wiring.replayable_list[op] or not seen[op]):
            legal.append(op)
            seen[op] = True
    return without_dead_runs(wiring, np.array(legal, dtype=np.int64))


def sequences(
    wiring: Wiring, recursion: Recursion, deadline: float, only: int | None = None
) -> Iterator[tuple[int, Ints]]:
    """Yield legal sequences with their k, from storing everything down to k = 1.

    Ends at `deadline` of `time.perf_counter`, but not before the first, and where the sequences are
    longer than 60 times the ops; with `only` a k, nothing else is tried.
    """
    limits = _recursion_limits(recursion.bag_count) if only is None else [only]
    for tried, k in enumerate(limits):
        if tried and time.perf_counter() > deadline:
            return
        order = recursion.order(k, _MOST_LENGTHS * wiring.op_count)
        if order is None:
            return
        yield k, playable(wiring, order)


@dataclass(frozen=True)
class RecursionSolver(PlainSolver, ABC):
    """Takes the fastest sequence of a recursion within the budget: with one k, or over all.

    Raises:
        InvalidProblem: if `k` is no whole number of 1 or more.
    """

    name: ClassVar[str]

    k: int | None = None

    def __post_init__(self) -> None:
        if self.k is not None:
            check_whole("k", self.k)

    @abstractmethod
    def recursion(self, precedence: Precedence) -> Recursion:
        """Decompose a graph."""

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Try k from storing everything down to 1 (for 30 s if no limit is set).

        `LIMIT` with the minimal peak met if none fits.
        """
        wiring = problem.wiring
        recursion = self.recursion(Precedence.of(wiring))
        deadline = time.perf_counter() + limit.left(_DEFAULT_SECONDS)
        incumbent = Incumbent(self.name, wiring, problem.budget_bytes, limit, report, bounded=False)
        for k, sequence in sequences(wiring, recursion, deadline, self.k):
            schedule = trace(wiring, sequence)
            incumbent.offer(schedule)
            duration = sequence_time(wiring, sequence)
            incumbent.say(f"k={k}: time {duration:.6g}, peak {schedule.peak_bytes} bytes")
            if incumbent.closed():
                break
        return incumbent.solution()


def _recursion_limits(bag_count: int) -> list[int]:
    """List the k to try, from above the number of bags, about two per octave."""
    limits = [bag_count + 1]
    while limits[-1] > 1:
        limits.append(min(limits[-1] - 1, limits[-1] * 5 // 7))
    return limits
