"""The curve of time against peak of a model or a graph.

The curve itself is made by `remat_solvers.tradeoff`. Of a model, budgets are meant as in `plan`:
they bound all that a step allocates, so that what is set aside for the loss outside the module is
part of every budget, and each `budget_bytes` can be handed to `rematerialize`. Schedules and their
`peak_bytes` are those of the graph alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from itertools import islice
from typing import TYPE_CHECKING, Any

import remat_solvers
from remat.budgets.budget import Budget, parse_budget
from remat.errors import BudgetError, RematError
from remat.planning.cutting import check_method, hierarchy_for
from remat.planning.flags import check_flag
from remat.planning.kernels import Kernels, read_kernels
from remat.planning.numerics import read_numerics
from remat_graph import (
    Graph,
    Solution,
    Status,
    leave_late,
    put_in_leaves,
    simulate,
    without_leaves,
)
from remat_partition import Partitioner
from remat_solvers import (
    Progress,
    Solver,
    Tradeoff,
    TradeoffPoint,
    check_tradeoff,
    smallest_budget,
    store_all,
)

if TYPE_CHECKING:
    import torch

    from remat.planning.outputs import Outputs
    from remat_exec import Loss
    from remat_graph.torch import Costs

__all__ = [
    "read_budgets",
    "tradeoff",
]

_SMALLEST_SECONDS = 5.0  # to look for the smallest budget of one program


def tradeoff(
    model: torch.nn.Module | Graph,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    points: int = 8,
    budgets: Sequence[int | float | str] | None = None,
    solver: str | Solver = "auto",
    costs: Costs = "measure",
    limit_seconds: float | None = None,
    executor: Executor | None = None,
    progress: Callable[[Progress], None] | None = None,
    loss: Loss | None = None,
    numerics: str | None = None,
    partitioner: str | Partitioner | None = None,
    outputs: Outputs | None = None,
    optimizer_in_backward: bool = False,
    kernels: Kernels = "eager",
    keep_best: bool = False,
) -> Tradeoff:
    """Find the fastest schedules within several budgets, and what no schedule can beat at each.

    Of a model, whose example call is `args` and `kwargs`, or of a graph. `points` budgets are
    spread from the smallest that is found to work to what storing everything takes; `budgets`, as
    those of `plan`, are taken in their place. Fractions are of plain autograd's peak, by estimated
    costs of the estimated one (for a graph, of the peak of storing everything). `costs`, `loss`,
    `numerics`, `partitioner`, `outputs`, `optimizer_in_backward` and `kernels` are those of `plan`;
    the rest is that of `remat_solvers.tradeoff`, also that Ctrl-C keeps what was found with
    `keep_best`.
    Arguments are checked before the model is looked at. Nothing of it is changed.

    With `numerics` or `kernels` there may be several programs, such as those with slices. Each has
    a curve, and an equal share of the limit. A point then has the fastest schedule of any program,
    and the least of their bounds. Where none has one, outputs that can be are made when they are
    read, as in a plan.

    Raises:
        BudgetError: if a budget cannot be read, or is `"auto"`.
        InvalidProblem: if there are fewer than 2 points, no budgets, a negative limit, or what is
            no executor or progress.
        CaptureError: if the model cannot be captured as one static graph.
        SolverError: if the solver is unknown, broken or unsuitable.
        PartitionError: if the partitioner is, or cannot cut the graph.
        LossError: if the loss cannot be run or differentiated.
        RematError: if the model is neither a module nor a graph, `kwargs` no mapping, or a graph is
            given together with what is said of a model; as `plan` else.
    """
    check_tradeoff(points, budgets, solver, limit_seconds, executor, progress)
    check_method(solver, partitioner)
    check_flag("optimizer_in_backward", optimizer_in_backward)
    allowed = read_kernels(kernels, read_numerics(numerics), wait=False)
    wanted = read_budgets(budgets)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise RematError(f"kwargs={kwargs!r}; give a dict of the keyword arguments of the model")

    def curve(graph: Graph, sizes: Sequence[int | float] | None, programs: int = 1) -> Tradeoff:
        solved = remat_solvers.tradeoff(
            graph,
            points=points,
            budgets=sizes,
            solver=solver,
            hierarchy=hierarchy_for(graph, solver, partitioner),
            limit_seconds=None if limit_seconds is None else limit_seconds / programs,
            executor=executor,
            progress=progress,
            keep_best=keep_best,
        )
        return _with_late_leaving(graph, solved)

    if isinstance(model, Graph):
        of_a_model = args is not None or kwargs or costs != "measure"
        of_a_model = of_a_model or outputs is not None or optimizer_in_backward
        if of_a_model or loss is not None or allowed is not None:
            raise RematError(
                "a graph has its costs; args, kwargs, costs, loss, numerics, kernels, outputs and "
                "optimizer_in_backward are for a model"
            )
        return curve(model, None if wanted is None else [_of_graph(budget) for budget in wanted])
    from remat.planning.model_curves import graphs_and_budgets  # noqa: PLC0415 - torch

    ways, sizes, aside = graphs_and_budgets(
        model, args, kwargs or {}, wanted, costs, loss, allowed, outputs, optimizer_in_backward,
        kernels,
    )  # fmt: skip
    graphs = [graph for way in ways for graph in way]
    if len(graphs) == 1:
        return _with_aside(curve(graphs[0], sizes), aside)
    seconds = _SMALLEST_SECONDS
    if limit_seconds is not None:
        seconds = min(seconds, limit_seconds / len(graphs))
    smallest = [_smallest(graph, graph, seconds) for graph in graphs] if sizes is None else []
    sizes = _spread_over(graphs[0], smallest, points) if sizes is None else sizes
    solved = iter([curve(graph, sizes, len(graphs)) for graph in graphs])
    if smallest:
        solved = map(_with_known, solved, smallest)
    curves = [_fastest(list(islice(solved, len(way)))) for way in ways]
    return _with_aside(_first_that_fits(curves), aside)


def _with_known(curve: Tradeoff, known: Solution) -> Tradeoff:
    """Take a known schedule where none was found within the limit."""

    def point(each: TradeoffPoint) -> TradeoffPoint:
        if each.solution is not None or known.peak_bytes > each.budget_bytes:
            return each
        solution = dataclasses.replace(known, lower_bound=each.lower_bound)
        return dataclasses.replace(each, solution=solution)

    return dataclasses.replace(curve, points=tuple(map(point, curve.points)))


def _first_that_fits(curves: Sequence[Tradeoff]) -> Tradeoff:
    """Make one curve of several at the same budgets: later ones count where no other has a plan."""
    of_all = _fastest(curves)
    first = curves[0].points
    points = (a if a.solution is not None else b for a, b in zip(first, of_all.points, strict=True))
    return dataclasses.replace(of_all, points=tuple(points))


def _with_late_leaving(graph: Graph, curve: Tradeoff) -> Tradeoff:
    """Let no gradient leave before its parameter is read; a point has what fits its budget then.

    The time stays, a peak may rise: bounds on every schedule hold as before.
    """
    solved = [point.solution for point in curve.points if point.solution is not None]
    solutions = [_leaving_late(graph, solution) for solution in solved]
    as_solved = all(late is each for late, each in zip(solutions, solved, strict=True))
    if without_leaves(graph) is graph or (solved and as_solved):
        return curve
    solutions.append(_leaving_from_held(graph))

    def fitting(point: TradeoffPoint) -> TradeoffPoint:
        fits = [each for each in solutions if each.peak_bytes <= point.budget_bytes]
        best = min(fits, key=lambda solution: solution.time, default=None)
        if best is not None and best is not point.solution:
            bound = point.lower_bound
            is_proved = bound is not None and best.time <= bound
            status = Status.OPTIMAL if is_proved else Status.FEASIBLE
            best = dataclasses.replace(best, lower_bound=bound, status=status)
        return dataclasses.replace(point, solution=best)

    peaks = [solution.peak_bytes for solution in solutions]
    return dataclasses.replace(
        curve,
        points=tuple(map(fitting, curve.points)),
        smallest_bytes=min(curve.store_all_peak_bytes, *peaks),
    )


def _leaving_late(graph: Graph, solution: Solution) -> Solution:
    schedule = solution.schedule
    late = schedule and leave_late(graph, schedule)
    if late is None or late is schedule:
        return solution
    peak = simulate(graph, late).peak_bytes
    return dataclasses.replace(solution, schedule=late, peak_bytes=peak)


def _leaving_from_held(graph: Graph) -> Solution:
    """Give the schedule of the smallest peak that holds gradients to the end, but for holding."""
    return _smallest(graph, without_leaves(graph), _SMALLEST_SECONDS)


def _smallest(graph: Graph, as_held: Graph, limit_seconds: float) -> Solution:
    """Give the schedule of the smallest peak of a graph, as far as its form `as_held` shows it."""
    started = time.perf_counter()
    held = smallest_budget(as_held, limit_seconds=limit_seconds)
    schedule = held.schedule if as_held is graph else put_in_leaves(graph, held.schedule)
    timeline = simulate(graph, schedule)
    return Solution(
        Status.FEASIBLE,
        schedule,
        timeline.time,
        timeline.peak_bytes,
        None,
        solver="smallest budget",
        solve_seconds=time.perf_counter() - started,
    )


def _spread_over(first: Graph, smallest: Sequence[Solution], points: int) -> list[int | float]:
    """Spread budgets from the smallest of any program to storing everything of the first."""
    least = min(solution.peak_bytes for solution in smallest)
    room = max(0, simulate(first, store_all(first)).peak_bytes - least)
    return sorted({max(1, least + room * i // (points - 1)) for i in range(points)})


def _fastest(curves: Sequence[Tradeoff]) -> Tradeoff:
    """Make one curve of those of several programs at the same budgets."""
    doubts = [curve.doubt for curve in curves if curve.doubt is not None]
    return dataclasses.replace(
        curves[0],
        points=tuple(
            _fastest_point(points)
            for points in zip(*(curve.points for curve in curves), strict=True)
        ),
        smallest_bytes=min(curve.smallest_bytes for curve in curves),
        least_bytes=min(curve.least_bytes for curve in curves),
        seconds=sum(curve.seconds for curve in curves),
        doubt=doubts[0] if doubts else None,
    )


def _fastest_point(points: Sequence[TradeoffPoint]) -> TradeoffPoint:
    """Take the fastest schedule of several programs; none of them takes less than the bound."""
    bounds = [point.lower_bound for point in points if not point.proved_infeasible]
    proved = [bound for bound in bounds if bound is not None]
    bound = min(proved) if proved and len(proved) == len(bounds) else None
    solutions = [point.solution for point in points if point.solution is not None]
    best = min(solutions, key=lambda solution: solution.time, default=None)
    if best is not None and best.lower_bound != bound:
        best = dataclasses.replace(best, lower_bound=bound, status=Status.FEASIBLE)
    errors = [point.error for point in points if point.error is not None]
    return TradeoffPoint(
        points[0].budget_bytes,
        best,
        bound,
        proved_infeasible=all(point.proved_infeasible for point in points),
        seconds=sum(point.seconds for point in points),
        error=errors[0] if errors else None,
    )


def read_budgets(budgets: Sequence[int | float | str] | None) -> list[Budget] | None:
    """Read budgets as points of a curve.

    Raises:
        BudgetError: if one cannot be read, or is `"auto"`.
    """
    return None if budgets is None else [_read(budget) for budget in budgets]


def _read(budget: int | float | str) -> Budget:
    parsed = parse_budget(budget)
    if parsed.is_auto:
        raise BudgetError(f"budget={budget!r} is no point of a curve; give bytes or a fraction")
    return parsed


def _of_graph(budget: Budget) -> int | float:
    return budget.size_bytes or budget.fraction or 0


def _with_aside(curve: Tradeoff, aside: int) -> Tradeoff:
    """Turn budgets of the graph into budgets of a step."""
    return dataclasses.replace(
        curve,
        points=tuple(
            dataclasses.replace(point, budget_bytes=point.budget_bytes + aside)
            for point in curve.points
        ),
        store_all_peak_bytes=curve.store_all_peak_bytes + aside,
        smallest_bytes=curve.smallest_bytes + aside,
        least_bytes=curve.least_bytes + aside,
    )
