"""The largest batch that fits into a budget, at no more than a wanted share of extra time.

Assumes that sizes, workspace and times grow in proportion to the batch, but for the values named as
fixed (gradients of parameters, say). Then a schedule that fits a batch fits every smaller one, so
batch sizes are halved between the largest for which storing everything fits and the smallest for
which one op alone does not; each is asked of a solver.

Guarantee: the batch found has a checked schedule; `proved` says whether the next larger one is
proved to have none in the order of the graph. Complexity: log2 of the range solves.
Source: Jain et al. 2020, section 6.4: maximise the batch B with B U <= budget and the time at most
that of one more forward half. There B multiplies the program's memory; here, with values that do
not scale, one program is solved per B.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

from remat_graph import Graph, Solution, Stage, Status, simulate
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.problem import Limit, Problem, Solver, check_graph, check_whole
from remat_solvers.core.store_all import StoreAll, store_all
from remat_solvers.core.wiring import MOST_BYTES, Wiring, total_bytes
from remat_solvers.errors import BudgetTooSmall, InvalidProblem
from remat_solvers.registry import get_solver
from remat_solvers.solve import AUTO, solve

__all__ = ["LargestBatch", "max_batch_size", "with_batch"]

_DEFAULT_SECONDS = 60.0
_LARGEST = 2**20


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch found; `solution` is for `graph`, or `None` with batch size 0.

    `proved`: no schedule in the order of the graph takes a larger batch within the budget and time.
    """

    batch_size: int
    graph: Graph | None
    solution: Solution | None
    proved: bool


def with_batch(
    graph: Graph, batch_size: int, *, of_batch: int = 1, fixed: Collection[str] = ()
) -> Graph:
    """Scale a graph of batch `of_batch` to another batch; bytes are rounded up.

    Raises:
        InvalidProblem: if the graph is none, a batch is no whole number of 1 or more or so large
            that sizes cannot be counted, or what is fixed are no values of the graph.
    """
    check_graph(graph)
    _check_batch("batch_size", batch_size)
    _check_batch("of_batch", of_batch)
    fixed = _names(graph, fixed)

    def scaled(count: int) -> int:
        return -(-count * batch_size // of_batch)

    return dataclasses.replace(
        graph,
        values=tuple(
            v if v.name in fixed else dataclasses.replace(v, size_bytes=scaled(v.size_bytes))
            for v in graph.values
        ),
        ops=tuple(
            dataclasses.replace(
                op,
                time=op.time * batch_size / of_batch,
                workspace_bytes=scaled(op.workspace_bytes),
                overwrites=tuple(
                    (read, written)
                    for read, written in op.overwrites
                    if (read in fixed) == (written in fixed)
                ),
            )
            for op in graph.ops
        ),
    )


def max_batch_size(
    graph: Graph,
    budget_bytes: int,
    *,
    of_batch: int = 1,
    fixed: Collection[str] = (),
    max_overhead: float | None = None,
    solver: str | Solver = AUTO,
    limit_seconds: float | None = None,
    executor: Executor | None = None,
) -> LargestBatch:
    """Find the largest batch for which a schedule fits and takes at most so much longer.

    `graph` is of batch `of_batch`. `max_overhead` is the extra time as a share of computing every
    op once; by default that of one more forward half (of all ops if there is no backward half). The
    limit is 60 s if none is set. Batches are asked one by one, each with `executor`, as in `solve`.

    Raises:
        InvalidProblem: as `solve` and `with_batch`, or if the overhead is no number of 0 or more,
            or no value grows with the batch.
    """
    Problem(graph, budget_bytes, executor=executor)
    if solver != AUTO:
        get_solver(solver)
    _check_batch("of_batch", of_batch)
    fixed = _names(graph, fixed)
    if max_overhead is None:
        forward = math.fsum(op.time for op in graph.ops if op.stage is Stage.FORWARD)
        max_overhead = forward / graph.time if graph.time else 0.0
    if not (isinstance(max_overhead, numbers.Real) and max_overhead >= 0):
        raise InvalidProblem(f"max_overhead={max_overhead!r}; it must be a number, 0 or more")
    limit = Limit.starting_now(limit_seconds)

    def scale(batch: int) -> Graph:
        return with_batch(graph, batch, of_batch=of_batch, fixed=fixed)

    def surely_fits(batch: int) -> bool:
        return _stored(scale(batch)) <= budget_bytes

    def may_fit(batch: int) -> bool:
        return peak_bound(Wiring.of(scale(batch))).peak_bytes <= budget_bytes

    countable = of_batch * (MOST_BYTES // 2) // max(1, total_bytes(graph))
    largest = max(1, min(_LARGEST, countable))
    if may_fit(largest):
        raise InvalidProblem(
            f"a batch of {largest:,} may fit; do any values grow with the batch? "
            f"fixed are {len(fixed)} of {len(graph.values)}"
        )
    high = _last(may_fit, 0, largest) + 1
    low = _last(surely_fits, 0, high)
    proved = True
    # Asked of `store-all`, since not every solver finds it.
    best = (
        _ask(scale(low), budget_bytes, StoreAll.name, None, max_overhead, None)[0] if low else None
    )
    while high - low > 1:
        left = limit.left(_DEFAULT_SECONDS)
        if left <= 0:
            return LargestBatch(low, scale(low) if low else None, best, proved=False)
        seconds = left / math.ceil(math.log2(high - low))
        middle = (low + high) // 2
        solution, refused = _ask(
            scale(middle), budget_bytes, solver, seconds, max_overhead, executor
        )
        if solution is not None:
            low, best = middle, solution
        else:
            high, proved = middle, refused
    return LargestBatch(low, scale(low) if low else None, best, proved)


def _check_batch(name: str, size: int) -> None:
    check_whole(name, size)
    if size > MOST_BYTES:
        raise InvalidProblem(f"{name} is above {MOST_BYTES:,}, as far as bytes are counted")


def _names(graph: Graph, names: object) -> frozenset[str]:
    """Read names of values.

    Raises:
        InvalidProblem: if it is no collection of them.
    """
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise InvalidProblem(f"fixed={names!r}; give names of values, such as ['weights']")
    checked = tuple(names)
    for name in checked:
        if not isinstance(name, str) or name not in graph.value_by_name:
            raise InvalidProblem(f"fixed value {name!r} is no value of the graph")
    return frozenset(checked)


def _stored(graph: Graph) -> int:
    return simulate(graph, store_all(graph)).peak_bytes


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Find the last batch above `low` and below `high` for which it holds, `low` if none."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _ask(
    graph: Graph,
    budget_bytes: int,
    solver: str | Solver,
    seconds: float | None,
    max_overhead: float,
    executor: Executor | None,
) -> tuple[Solution | None, bool]:
    """Solve one batch: the solution if it is good enough, and else whether none can be."""
    most = graph.time * (1 + max_overhead) * (1 + 1e-9) if graph.time else 0.0
    try:
        solution = solve(
            graph, budget_bytes, solver=solver, limit_seconds=seconds, executor=executor
        )
    except BudgetTooSmall as error:
        return None, error.status is Status.INFEASIBLE
    if solution.time <= most:
        return solution, False
    return None, solution.lower_bound is not None and solution.lower_bound > most
