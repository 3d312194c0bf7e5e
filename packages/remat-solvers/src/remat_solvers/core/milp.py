"""The door to MILP solvers: a program in matrix form, solved through CVXPY.

HiGHS by default; any MILP solver that CVXPY has installed can be named. HiGHS and Gurobi are given
the time limit, the gap, the start point and a single thread, and give a bound back; the others run
as long as they run, with their own gap, and a program with whole variables gets no bound from them.
"Infeasible" and "out of time" are different answers, and a back end that fails is an error (Gurobi
does, with the licence that comes from pip, beyond 2,000 variables).

HiGHS's cuts on continuous variables can cut off the optimum, so the programs of this package
declare whole whatever is whole in some optimum. An answer that a known point contradicts (the start
or its own point below its bound) is refused, and the back end believed no more (`trust`). Why, and
how often: docs/decisions/0014.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import logging
import math
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from remat_solvers.core.background import in_background
from remat_solvers.core.trust import distrust
from remat_solvers.core.wiring import Floats
from remat_solvers.errors import BackEndFailed

if TYPE_CHECKING:
    import cvxpy as cp

__all__ = [
    "HIGHS",
    "Answer",
    "BudgetedProgram",
    "Outcome",
    "Program",
    "missing_back_end",
    "relaxed",
    "restricted",
    "solve_program",
]

HIGHS, _GUROBI = "HIGHS", "GUROBI"  # as CVXPY calls them, and how it says that a solve ended:
_OPTIMAL = "optimal"
_INFEASIBLE = ("infeasible", "infeasible_or_unbounded")  # the box bounds every program
# Else HiGHS spends most of the time on few nodes: on trying their branches, and on beginning anew.
_MANY_NODES = {"mip_pscost_minreliable": 0, "mip_allow_restart": False}
_ANEW = {**_MANY_NODES, "mip_allow_restart": True}
_SECONDS_ANEW = 2.0
_NEAR, _FAR = 0.01, 0.02  # from the start to what is proved; decision 0045
_TOLERANCE = 1e-5
_STRICT = 1e-8  # within which a point satisfies its rows by the tolerances of any back end
_INTERIOR_COLUMNS = 20_000

_log = logging.getLogger(__name__)
_filters_of_warnings = threading.Lock()  # one list, of the process


def missing_back_end(name: str) -> str | None:
    """Say what to install where CVXPY has no solver of this name, or `None`."""
    if not isinstance(name, str):
        return f"back_end={name!r}; give the name of a solver of CVXPY, such as 'HIGHS'"
    if name == HIGHS:  # a dependency
        return None
    import cvxpy as cp  # noqa: PLC0415 - takes a second

    installed: list[str] = cp.installed_solvers()  # type: ignore[no-untyped-call]
    if name in installed:
        return None
    extra = name.lower().replace("_", "-")
    offered = importlib.metadata.metadata("cvxpy").get_all("Provides-Extra") or []
    if name == _GUROBI:
        help_ = "pip install remat-solvers[gurobi]"
    elif extra in offered:
        help_ = f"pip install cvxpy[{extra}]"
    else:
        help_ = "see cvxpy.org for how to install it"
    return f"CVXPY has no solver {name!r} installed; {help_}, or use one of {', '.join(installed)}"


class Outcome(enum.StrEnum):
    """How a solve ended: as good as was wanted, infeasible by proof, or stopped by a limit."""

    SOLVED = "solved"
    INFEASIBLE = "infeasible"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Minimise `cost @ x` subject to `matrix @ x <= right` and `lower <= x <= upper`.

    `integral` marks the variables that must be whole.
    """

    cost: Floats
    matrix: sparse.csr_array
    right: Floats
    lower: Floats
    upper: Floats
    integral: NDArray[np.bool_]


def relaxed(program: Program) -> Program:
    """Drop the wish for whole variables: the linear relaxation."""
    return dataclasses.replace(program, integral=np.zeros_like(program.integral))


def restricted(program: Program, point: Floats, free: NDArray[np.bool_]) -> Program:
    """Fix all columns but the `free` ones at a point, and leave them out; so too of the cost."""
    matrix = program.matrix[:, free]
    rows = np.diff(matrix.indptr) > 0
    return Program(
        cost=program.cost[free],
        matrix=matrix[rows],
        right=(program.right - program.matrix @ np.where(free, 0.0, point))[rows],
        lower=program.lower[free],
        upper=program.upper[free],
        integral=program.integral[free],
    )


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The best point found, and a lower bound on all points; either may be missing."""

    outcome: Outcome
    point: Floats | None
    value: float
    bound: float


def solve_program(
    program: Program,
    *,
    seconds: float,
    gap: float = 0.0,
    start: Floats | None = None,
    target: float | None = None,
    apart: float | None = None,
    back_end: str = HIGHS,
    meanwhile: Callable[[float], None] | None = None,
) -> Answer:
    """Solve within a time limit, to a relative gap, from a start point (if it can be handed on).

    A point of at most `target` is as good as wanted, whatever the bound (HiGHS alone). `apart` is
    how far the start is from what is proved, relative to computing everything once: where that is
    little, a search that begins anew once columns are fixed may end at once; where it is much, it
    proves more. `meanwhile` is called by turns, with the seconds of a turn, while the back end
    works, if there is a second core.

    Raises:
        BackEndFailed: if the back end gives no answer at all, as one without a licence.
    """
    count = len(program.cost)
    if count == 0:
        feasible = bool(np.all(program.right >= 0))
        outcome = Outcome.SOLVED if feasible else Outcome.INFEASIBLE
        return Answer(outcome, np.zeros(0) if feasible else None, 0.0, 0.0)
    import cvxpy as cp  # noqa: PLC0415 - takes a second

    x = cp.Variable(count, bounds=[program.lower, program.upper], **_kind(program.integral))
    problem = cp.Problem(cp.Minimize(program.cost @ x), [program.matrix @ x <= program.right])
    more: dict[str, Any] = {}
    if back_end == HIGHS and target is not None:
        more = {"objective_target": target}

    def run(seconds: float, start: Floats | None, options: dict[str, Any]) -> Answer:
        answer = _run(problem, x, program, seconds, gap, start, back_end, options, meanwhile)
        if answer.outcome is Outcome.STOPPED and target is not None and answer.value <= target:
            return dataclasses.replace(answer, outcome=Outcome.SOLVED)
        return answer

    if back_end != HIGHS or not program.integral.any():
        return run(seconds, start, more)
    if apart is None or apart > _NEAR:
        far = apart is not None and apart > _FAR
        return run(seconds, start, more | (_ANEW if far else _MANY_NODES))
    started = time.perf_counter()
    first = run(min(_SECONDS_ANEW, seconds), start, more | _ANEW)
    left = seconds - (time.perf_counter() - started)
    if first.outcome is not Outcome.STOPPED or left <= 0:
        return first
    answer = run(left, start if first.point is None else first.point, more | _MANY_NODES)
    if first.value < answer.value:  # the start could not be handed on
        answer = dataclasses.replace(answer, point=first.point, value=first.value)
    return dataclasses.replace(answer, bound=max(answer.bound, first.bound))


class BudgetedProgram:
    """A program solved at one budget after another; CVXPY writes its canonical form once.

    Its right side is `program.right + budget_bytes * per_byte`.
    """

    def __init__(self, program: Program, per_byte: Floats, back_end: str = HIGHS) -> None:
        import cvxpy as cp  # noqa: PLC0415 - takes a second

        self._program = program
        self._per_byte = per_byte
        self._back_end = back_end
        self._x = cp.Variable(
            len(program.cost), bounds=[program.lower, program.upper], **_kind(program.integral)
        )
        # A share of a fixed scale, so that the parameter is near 1 whatever the size of the graph.
        self._scale = 1 / max(float(per_byte.max(initial=0.0)), 1e-300)
        self._share = cp.Parameter()
        right = program.right + self._share * (per_byte * self._scale)
        self._problem = cp.Problem(
            cp.Minimize(program.cost @ self._x), [program.matrix @ self._x <= right]
        )

    def solve(
        self, budget_bytes: float, *, seconds: float, gap: float = 0.0, start: Floats | None = None
    ) -> Answer:
        """Solve at a budget; as `solve_program`, with its error."""
        self._share.value = budget_bytes / self._scale
        right = self._program.right + budget_bytes * self._per_byte
        program = dataclasses.replace(self._program, right=right)
        return _run(self._problem, self._x, program, seconds, gap, start, self._back_end, {})


def _run(
    problem: cp.Problem,
    x: cp.Variable,
    program: Program,
    seconds: float,
    gap: float,
    start: Floats | None,
    back_end: str,
    more: dict[str, Any],
    meanwhile: Callable[[float], None] | None = None,
) -> Answer:
    from cvxpy.error import SolverError  # noqa: PLC0415 - takes a second

    try:
        options = _options(x, seconds, gap, back_end) | more
        if start is not None and back_end == _GUROBI:
            x.value = start  # which the canonical form holds
        data, chain, inverse = problem.get_problem_data(back_end, solver_opts=options)
        warm_start = _hand_over(problem, start, back_end)
    except Exception as error:  # each back end has its own, as where a licence has ended
        raise BackEndFailed(back_end, len(program.cost), error) from error

    def call() -> Any:
        try:
            return chain.solve_via_data(problem, data, warm_start, False, options)
        except Exception as error:
            raise BackEndFailed(back_end, len(program.cost), error) from error

    solution = in_background(call, meanwhile)
    try:
        with _filters_of_warnings, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Solution may be inaccurate", UserWarning)
            problem.unpack_results(solution, chain, inverse)
    except SolverError as error:
        raise BackEndFailed(back_end, len(program.cost), error) from error
    except ValueError as error:  # a status that CVXPY lacks
        _log.warning("%s gave up on %d variables: %s", back_end, len(program.cost), error)
        return Answer(Outcome.STOPPED, None, math.inf, -math.inf)
    return _confront(_read(problem, x, program), program, start, back_end)


def _confront(answer: Answer, program: Program, start: Floats | None, back_end: str) -> Answer:
    """Refuse an answer that its own point or the start proves wrong; the better one still stands.

    The back end is believed no more if that point satisfies all rows, not just nearly.
    """
    point, value = answer.point, answer.value
    if start is not None and program.cost @ start < value and _holds(program, start):
        point, value = start, float(program.cost @ start)
    if point is None or answer.bound <= value:
        return answer
    if answer.bound <= value + _TOLERANCE * (1 + abs(value)):
        return dataclasses.replace(answer, bound=value)
    cause = (
        f"it gave the bound {answer.bound:g} to a program in which a point of {value:g} is feasible"
    )
    if _holds(program, point, _STRICT):
        distrust(back_end, cause)
    else:
        _log.warning("%s: %s, nearly; refused", back_end, cause)
    return Answer(Outcome.STOPPED, point, value, -math.inf)


def _options(x: cp.Variable, seconds: float, gap: float, back_end: str) -> dict[str, Any]:
    """Say it in the words of the back end."""
    if back_end == HIGHS:
        # Of 89,000 columns, the simplex method took 39 s, an interior point with crossover 2 s.
        large = x.size > _INTERIOR_COLUMNS and not x.attributes["integer"]
        return {
            "highs_options": {"solver": "ipm"} if large else {},
            "time_limit": max(seconds, 0.01),
            "mip_rel_gap": gap,
            "threads": 1,
            "parallel": "off",
        }
    if back_end == _GUROBI:
        import gurobipy  # noqa: PLC0415 - an extra

        return {
            "TimeLimit": max(seconds, 0.01),
            "MIPGap": gap,
            "Threads": 1,
            "reoptimize": True,  # to tell infeasible from unbounded
            # Of its own, as threads may not share one; the default one prints its licence.
            "env": gurobipy.Env(params={"OutputFlag": 0}),
        }
    return {}


def _kind(integral: NDArray[np.bool_]) -> dict[str, Any]:
    if not integral.any():
        return {}
    return {"integer": True if integral.all() else list(np.nonzero(integral))}


def _hand_over(problem: cp.Problem, start: Floats | None, back_end: str) -> bool:
    """Leave a start point where CVXPY's interface looks for that of the solve before, if it does.

    Gurobi's looks at the variables only if there was none. Once the canonical form is there, as the
    first one empties that place.
    """
    if back_end not in (HIGHS, _GUROBI):
        return True
    cache = getattr(problem, "_solver_cache", None)
    if start is None or not isinstance(cache, dict):
        return False
    if back_end == _GUROBI:
        cache.pop(back_end, None)
        return True
    import highspy  # noqa: PLC0415 - only this back end needs it

    solution = highspy.HighsSolution()
    solution.col_value = start.tolist()
    solution.value_valid = True
    cache[HIGHS] = (None, None, {"model_status": "kOptimal", "solution": solution})
    return True


def _read(problem: cp.Problem, x: cp.Variable, program: Program) -> Answer:
    status = problem.status
    if status in _INFEASIBLE:
        return Answer(Outcome.INFEASIBLE, None, math.inf, math.inf)
    stats = problem.solver_stats
    info = None if stats is None else stats.extra_stats
    point: Floats | None = None
    if x.value is not None and _holds(program, np.asarray(x.value)):
        point = np.where(program.integral, np.round(x.value), x.value)
    value = math.inf if point is None else float(program.cost @ point)
    outcome = Outcome.SOLVED if status == _OPTIMAL else Outcome.STOPPED
    if program.integral.any():
        # Of HiGHS and of Gurobi; others report none.
        bound = float(getattr(info, "mip_dual_bound", getattr(info, "ObjBound", -math.inf)))
    else:
        bound = _dual_bound(program, problem.constraints[0].dual_value)
    return Answer(outcome, point, value, bound)


def _dual_bound(program: Program, prices: Floats | None) -> float:
    """Bound a linear program by weak duality: whatever the prices of the rows are, it holds."""
    if prices is None or np.shape(prices) != program.right.shape or not np.isfinite(prices).all():
        return -math.inf
    prices = np.maximum(prices, 0.0)
    reduced = program.cost + program.matrix.T @ prices
    ends = np.where(reduced >= 0, program.lower, program.upper)
    moves = reduced != 0
    return float(reduced[moves] @ ends[moves] - prices @ program.right)


def _holds(program: Program, point: Floats, within: float = _TOLERANCE) -> bool:
    """Check a point; a solve that was stopped may leave one that means nothing."""
    if point.shape != program.cost.shape or not np.all(np.isfinite(point)):
        return False
    slack = program.right - program.matrix @ point
    inside = (point >= program.lower - within) & (point <= program.upper + within)
    whole = np.abs(point - np.round(point))[program.integral]
    rows = slack >= -within * (1 + np.abs(program.right))
    return bool(np.all(rows) and np.all(inside) and np.all(whole <= within))
