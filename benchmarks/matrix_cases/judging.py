"""One case, run in this process: remat beside plain eager and beside storing everything.

Each way of training starts from the same weights and the same random state, and takes three steps
of gradient descent, or ten whose inputs are of other sizes. Before its first step no model was
called.
"""

from __future__ import annotations

import functools
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import remat
from matrix_cases.case import Built, Case, NotRunnable, seed_everything
from matrix_cases.conditioning import beyond_rounding, in_double
from matrix_cases.other_sizes import draw_sizes
from matrix_cases.training import STEPS, Trained, error, is_finite, same_bits, train

__all__ = ["CATEGORIES", "FRACTION", "Outcome", "judge", "judge_eager"]

FRACTION = 0.6
RIGHT = 1e-5
ROUNDING = 1e-3
PLANNING_SECONDS = 1.0  # to solve: these models are tiny, and what counts is that they train
TRIES = 6
ROOM = 1.25  # beside what remat names, for larger sizes
VARIANTS = 2  # of a case whose inputs are of other sizes
PLENTY = 100 * 2**30
_LONG = 1500  # characters of a plan that are kept
Calls = Callable[[], list[Built]]

CATEGORIES = (
    "WRONG", "not bitwise", "OVER", "crash", "timeout", "foreign", "told over", "refused",
    "as compiled", "rounding", "right", "unstable in eager", "not runnable", "one size",
)  # fmt: skip
"""The worst first; the last three are not counted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one case came to.

    `error` is the largest relative difference to eager, `bitwise` whether the plan computed the
    bits of storing everything, `least` whether the budget had to be the least that remat names,
    `groups` how many compiled groups of operators the plan has. The peak is the one nearest to its
    budget. `sizes` are those of each step, where they differ, and `counts` what was traced,
    rehearsed and solved.
    """

    category: str
    reason: str = ""
    variant: str = ""
    error: float | None = None
    bitwise: bool | None = None
    least: bool = False
    plain_peak_bytes: int | None = None
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    planning_seconds: float | None = None
    step_seconds: float | None = None
    plans: int | None = None
    groups: int | None = None
    plan: str = ""
    inputs: str = ""
    sizes: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    parameters: int | None = None
    variants: int = 1
    categories: dict[str, int] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """List all that is known, for JSON."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "", {})}


def _refused(failure: BaseException) -> bool:
    """Tell whether an exception is one of remat's own."""
    kinds = type(failure).mro()
    return any(kind.__module__.partition(".")[0].startswith("remat") for kind in kinds)


def _failure(failure: BaseException) -> tuple[str, str]:
    reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:400]}"
    return ("refused" if _refused(failure) else "foreign"), reason


def _built(build: Callable[[], Built]) -> Built:
    torch._dynamo.reset()  # what it saw of the sizes of another training
    seed_everything(0)
    return build()


def _plain(build: Calls, *, peak: bool = True) -> tuple[Built, Trained]:
    """Train in eager.

    Raises:
        NotRunnable: if that fails, or is not finite.
    """
    try:
        calls = build()
        trained = train(calls, peak=peak)
    except NotRunnable:
        raise
    except Exception as failure:
        raise NotRunnable(
            f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        ) from failure
    if not is_finite(trained):
        raise NotRunnable("the loss or a gradient is not finite")
    return calls[0], trained


def _planned(budget: float, solver: str = "auto", *, groups: bool = False) -> Any:
    """Plan, with all operators in compiled groups that can be: by estimates these are faster."""
    options: dict[str, Any] = {"budget": budget, "solver": solver}
    if groups:
        options |= {"kernels": "inductor", "wait": True, "costs": "estimate"}
    return functools.partial(remat.rematerialize, limit_seconds=PLANNING_SECONDS, **options)


def _compiled(backend: str, model: Any) -> Any:
    """Run a model as TorchDynamo sees it: with its branches, or with its backward graph, too."""
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def _within(
    build: Calls, budget: float, room: float, *, groups: bool
) -> tuple[Trained | None, float, bool, BaseException | None]:
    """Train within a budget, or within what remat names when it refuses that, and room beside.

    What is named may grow: with the sizes of each step, and by workspaces, which estimates of
    compiled groups do not know.
    """
    least = False
    for _ in range(TRIES if groups or room > 1.0 else 2):
        try:
            trained = train(build(), _planned(budget, groups=groups))
        except remat.BudgetTooSmall as failure:
            if (least and not groups and room == 1.0) or failure.smallest_bytes <= budget:
                return None, budget, least, failure
            budget, least = int(room * failure.smallest_bytes), True
        except Exception as failure:
            return None, budget, least, failure
        else:
            return trained, budget, least, None
    return None, budget, least, remat.RematError("the least that is named grows with each try")


def _judge_variant(
    variant: str, build: Callable[[], Built], *, groups: bool = False, seed: int | None = None
) -> Outcome:
    """Judge a variant: with inputs that stay as they are, or of sizes drawn by a seed."""
    facts: dict[str, Any] = {"variant": variant}

    def calls() -> list[Built]:
        built = _built(build)
        return [built] * STEPS if seed is None else sizes.calls(built)

    try:
        if seed is not None:
            sizes = draw_sizes(lambda: _built(build), seed)
            if not sizes.axes:
                return Outcome("one size", **facts)
            facts["sizes"] = str(sizes)
        built, plain = _plain(calls, peak=seed is None)
        _, again = _plain(calls, peak=False)
    except NotRunnable as problem:
        return Outcome("not runnable", str(problem), **facts)
    facts |= {
        "inputs": built.inputs,
        "parameters": sum(parameter.numel() for parameter in built.model.parameters()),
        "plain_peak_bytes": plain.nearest.peak_bytes if plain.nearest else None,
    }
    drift, where = error(again, plain)
    if drift > RIGHT:
        return Outcome("unstable in eager", f"differs from itself by {drift:.1e}, {where}", **facts)
    del built, again
    budget, room = FRACTION, ROOM
    if seed is None:
        budget, room = int(FRACTION * facts["plain_peak_bytes"]), 1.0
    ours, budget, least, failure = _within(calls, budget, room, groups=groups)
    facts |= {"budget_bytes": budget, "least": least}
    if failure is not None or ours is None:
        category, reason = _failure(failure or AssertionError("no failure"))
        return Outcome(category, reason, **facts)
    off, where = error(ours, plain)
    plan, nearest = str(ours.plan), ours.nearest
    assert nearest is not None
    facts |= {
        "error": off,
        "counts": ours.counts,
        "peak_bytes": nearest.peak_bytes,
        "budget_bytes": nearest.budget_bytes or budget,
        "planning_seconds": max(0.0, ours.seconds[0] - min(ours.seconds)),
        "step_seconds": min(ours.seconds),
        "plans": _count_plans(ours.plan, plan),
        "plan": _first_lines(plan),
    }
    try:
        store_all = _planned(PLENTY, solver="store-all")
        ran_plain = {number: ours.steps[number] for number in ours.ran_plain}
        stored = train(calls(), store_all, peak=False, taken_over=ran_plain)
    except Exception as exception:
        category, reason = _failure(exception)
        return Outcome(category, f"storing everything: {reason}", **facts)
    facts["bitwise"] = same_bits(ours, stored)
    facts["groups"] = _count_groups(ours.plan)
    if off > ROUNDING and groups:  # at the kink of a ReLU, rounding decides on which side one is
        steps, beyond = _beyond_rounding(calls, 2 * budget)
        if not beyond:
            told = f"differs from eager by {off:.1e}, {where}; in doubles, by steps, {steps}"
            return Outcome("rounding", told, **facts)
        where += f"; {beyond}"
    if off > ROUNDING:
        for backend in ("eager", "aot_eager"):
            compiled = train(calls(), functools.partial(_compiled, backend), peak=False)
            if error(ours, compiled)[0] <= ROUNDING:
                told = f"eager differs by {off:.1e} from what torch.compile gives, too, {where}"
                return Outcome("as compiled", told, **facts)
        return Outcome("WRONG", f"differs from eager by {off:.1e}, {where}", **facts)
    if not facts["bitwise"] and not groups:
        off, where = error(ours, stored)
        return Outcome("not bitwise", f"{off:.1e} from storing everything, {where}", **facts)
    category, reason = _judge_peaks(ours, budget, sized=seed is not None)
    if category:
        return Outcome(category, reason, **facts)
    return Outcome("right" if off <= RIGHT else "rounding", **facts)


def _first_lines(text: str) -> str:
    """Give the first lines of a text, whole: of a path in part nobody could tell whose it is."""
    return text if len(text) <= _LONG else text[:_LONG].rpartition("\n")[0]


def _judge_peaks(ours: Trained, budget: float, *, sized: bool) -> tuple[str, str]:
    """Tell whether a measured step took more than the budget, and whether each was told of.

    Where sizes change, warnings of the training count, too, for steps of the same sizes alone.
    """
    told: list[tuple[float, str]] = []
    for step in ours.measured:
        over = step.peak_bytes / (step.budget_bytes or budget) - 1
        heard = step.told_over + (step.told_before if sized else ())
        if over > 0 and not heard:
            return "OVER", f"{100 * over:.1f}% over the budget"
        if over > 0 or (heard and sized):
            told.append((over, heard[0]))
    if not told:
        return "", ""
    over, reason = max(told)
    return "told over", (f"{100 * over:.1f}% over the budget: " if over > 0 else "") + reason


def _beyond_rounding(build: Calls, budget: float) -> tuple[str, str]:
    """Say how far groups are from eager in double precision, and where further than by rounding."""

    def calls() -> list[Built]:
        return in_double(build())

    _, plain = _plain(calls, peak=False)
    ours, _, _, failure = _within(calls, budget, 1.0, groups=True)
    if ours is None or failure is not None:
        return "", f"no plan in double precision: {failure}"
    return beyond_rounding(calls, ours, plain)


def _count_groups(plan: Any) -> int:
    """Count the compiled groups in the graphs of a plan."""
    graphs = [graph for graph, _ in getattr(plan, "runs", ())]
    return sum(op.name.endswith("__fused") for graph in graphs for op in graph.ops)


def _count_plans(plan: Any, text: str) -> int | None:
    """Count the parts of a plan that has several, as far as it tells."""
    for name in ("regions", "plans", "parts"):
        parts = getattr(plan, name, None)
        if isinstance(parts, (list, tuple)):
            return len(parts)
    match = re.search(r"(\d+) (?:regions|plans)|(?:regions|plans)\s+(\d+)", text)
    return int(match[1] or match[2]) if match else None


def _each(
    case: Case, one: Callable[[str, Callable[[], Built]], Outcome], seed: int | None = None
) -> Outcome:
    """Run all variants of a case, or two that are drawn by a seed; the worst stands for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            variants = case.variants()
            if seed is not None:
                variants = random.Random(seed).sample(variants, min(VARIANTS, len(variants)))
        except NotRunnable as error:
            return Outcome("not runnable", str(error))
        outcomes = [one(name, build) for name, build in variants]
    if len(outcomes) == 1:
        return outcomes[0]
    counts = {c: n for c in CATEGORIES if (n := sum(o.category == c for o in outcomes))}
    worst = min(outcomes, key=lambda outcome: CATEGORIES.index(outcome.category))
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    facts = {name: getattr(worst, name) for name in worst.__dataclass_fields__}
    facts |= {"variants": len(outcomes), "categories": counts, "error": max(errors, default=None)}
    return Outcome(**facts)


def judge(case: Case, *, groups: bool = False, seed: int | None = None) -> Outcome:
    """Run a case in this process, by eager kernels or by compiled groups of operators.

    With a `seed` its inputs are of other sizes in each step.
    """
    return _each(case, functools.partial(_judge_variant, groups=groups, seed=seed), seed)


def _eager_variant(variant: str, build: Callable[[], Built]) -> Outcome:
    try:
        built, trained = _plain(lambda: [_built(build)] * STEPS, peak=False)
    except NotRunnable as failure:
        return Outcome("not runnable", str(failure), variant)
    return Outcome(
        "right",
        variant=variant,
        inputs=built.inputs,
        step_seconds=min(trained.seconds),
        parameters=sum(parameter.numel() for parameter in built.model.parameters()),
    )


def judge_eager(case: Case) -> Outcome:
    """Build a case and train it in eager alone."""
    return _each(case, _eager_variant)
