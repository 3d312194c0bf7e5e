"""What is wrong with an answer, if anything: held against the simulator and against brute force."""

from __future__ import annotations

from collections.abc import Iterator

from remat_graph import InvalidSchedule, Solution, Status, simulate
from remat_solvers.core.problem import Problem

__all__ = ["faults"]

_TOLERANCE = 1e-6


def faults(problem: Problem, answer: object, best: float | None) -> list[str]:
    """List what is wrong with the answer of a solver, each as a sentence.

    `best` is the least time of all schedules in the order of the graph that fit, `None` if none
    does. Bounds, `OPTIMAL` and `INFEASIBLE` are claims about these.
    """
    if not isinstance(answer, Solution):
        return [f"it returned a {type(answer).__name__}, no Solution"]
    return [*_claims(answer, best), *_schedule(problem, answer, best)]


def _claims(answer: Solution, best: float | None) -> Iterator[str]:
    claims_schedule = answer.status in (Status.OPTIMAL, Status.FEASIBLE)
    if claims_schedule != (answer.schedule is not None):
        has = "no schedule" if answer.schedule is None else "a schedule"
        yield f"it claims {answer.status.value!r} with {has}"
    if answer.status is Status.INFEASIBLE and best is not None:
        yield f"it claims that nothing fits, but a schedule of time {best:g} does"
    bound = answer.lower_bound
    if bound is not None and best is not None and bound > best * (1 + _TOLERANCE):
        yield f"it claims the bound {bound:g}, but a schedule of time {best:g} fits"


def _schedule(problem: Problem, answer: Solution, best: float | None) -> Iterator[str]:
    if answer.schedule is None:
        return
    try:
        timeline = simulate(problem.graph, answer.schedule)
    except InvalidSchedule as error:
        yield f"its schedule is illegal: {error}"
        return
    time, peak = timeline.time, timeline.peak_bytes
    if peak > problem.budget_bytes:
        yield f"its schedule peaks at {peak} bytes, over the budget of {problem.budget_bytes}"
    if answer.peak_bytes != peak:
        yield f"it says that its schedule peaks at {answer.peak_bytes} bytes, not {peak}"
    if abs(answer.time - time) > _TOLERANCE * max(1.0, time):
        yield f"it says that its schedule takes {answer.time:g}, not {time:g}"
    if answer.lower_bound is not None and answer.lower_bound > time * (1 + 1e-9):
        yield f"it claims the bound {answer.lower_bound:g}, but its own schedule takes {time:g}"
    if best is not None and answer.status is Status.OPTIMAL and time > best * (1 + _TOLERANCE):
        yield f"it claims that a time of {time:g} is optimal, but one of {best:g} fits"
