"""One case, run in this process: remat beside plain eager and beside storing everything.

Each way of training starts from the same weights and the same random state, and takes three steps
of gradient descent. Before its first step no model was called.
"""

from __future__ import annotations

import functools
import math
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import remat
from matrix_cases.case import Built, Case, NotRunnable, seed_everything, tensors_in
from remat_exec import measure_peak

__all__ = ["CATEGORIES", "FRACTION", "Outcome", "judge", "judge_eager"]

FRACTION = 0.6
STEPS = 3
MORE_STEPS = 4  # after as many over the budget in a row without a plan, the next is refused
RIGHT = 1e-5
ROUNDING = 1e-3
RIGHT_IN_DOUBLE = 1e-10
FLOOR = 1e-4  # of the largest gradient of the model: what is smaller is noise of a sum to zero
PLANNING_SECONDS = 1.0  # to solve: these models are tiny, and what counts is that they train
PLENTY = 100 * 2**30

CATEGORIES = (
    "WRONG", "not bitwise", "OVER", "crash", "timeout", "foreign", "told over", "refused",
    "as compiled", "rounding", "right", "unstable in eager", "not runnable",
)  # fmt: skip
"""The worst first; the last two are not counted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one case came to.

    `error` is the largest relative difference to eager, `bitwise` whether the plan computed the
    bits of storing everything, `least` whether the budget had to be the least that remat names,
    `groups` how many compiled groups of operators the plan has.
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
    parameters: int | None = None
    variants: int = 1
    categories: dict[str, int] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """List all that is known, for JSON."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "", {})}


@dataclass(slots=True)
class _Trained:
    """Losses, gradients and buffers of each step, by name; and what the last step took."""

    steps: list[dict[str, Tensor]] = field(default_factory=list)
    peak_bytes: int | None = None
    told_over: bool = False
    seconds: list[float] = field(default_factory=list)
    plan: Any = None


def _snapshot(built: Built, loss: Tensor) -> dict[str, Tensor]:
    found = {"loss": loss.detach().clone()}
    for name, parameter in built.model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        found[name] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
    for index, leaf in enumerate(built.leaves):
        found[f"input {index}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
    for name, buffer in built.model.named_buffers():
        found[f"buffer {name}"] = buffer.detach().clone()
    return found


def _descend(built: Built) -> None:
    """Take a small step, of a length that does not depend on the scale of the loss."""
    gradients = [p.grad for p in built.model.parameters() if p.grad is not None]
    if not gradients:
        return
    scale = max(float(gradient.abs().max()) if gradient.numel() else 0.0 for gradient in gradients)
    with torch.no_grad():
        for parameter in built.model.parameters():
            if parameter.grad is not None:
                parameter.sub_(1e-3 * parameter.grad / max(scale, 1e-6))


def _train(
    built: Built, wrap: Callable[[Any], Any] | None = None, *, peak: bool = True
) -> _Trained:
    """Train for some steps; the last is then run once more and measured.

    Where regions are planned in each of them, it is run until there is a plan, or it is refused.
    """
    trained = _Trained()
    model = built.model if wrap is None else wrap(built.model)

    def prepare(number: int) -> None:
        built.model.zero_grad(set_to_none=True)
        for leaf in built.leaves:
            leaf.grad = None
        seed_everything(1000 + number)

    def step() -> Tensor:
        loss = built.loss(model(*built.args, **built.kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    for number in range(STEPS):
        prepare(number)
        start = time.perf_counter()
        loss = step()
        trained.seconds.append(time.perf_counter() - start)
        trained.steps.append(_snapshot(built, loss))
        _descend(built)
    trained.plan = getattr(model, "plan", None)
    if peak:
        for _ in range(MORE_STEPS):
            if wrap is not None and not hasattr(model.plan, "budget_bytes"):
                prepare(STEPS - 1)
                step()
        prepare(STEPS - 1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with measure_peak("cpu") as taken:
                step()
            trained.peak_bytes = taken.peak_bytes
            prepare(STEPS - 1)
            step()  # what is seen in a step may be told in the next
        trained.told_over = any(issubclass(w.category, remat.BudgetWarning) for w in told)
    return trained


def _error(found: _Trained, expected: _Trained) -> tuple[float, str]:
    """Find the largest relative difference over steps and tensors, and where it is.

    A loss may pass zero, where what rounding leaves of its terms is no share of it: its difference
    is relative to the largest of the steps.
    """
    worst, where = 0.0, ""
    largest_loss = max(float(step["loss"].abs().max()) for step in expected.steps)
    for number, (ours, theirs) in enumerate(zip(found.steps, expected.steps, strict=True)):
        gradients = [
            value
            for name, value in theirs.items()
            if name != "loss" and not name.startswith("buffer ") and value.numel()
        ]
        largest = max((float(value.abs().max()) for value in gradients), default=0.0)
        for name, wanted in theirs.items():
            floor = largest_loss if name == "loss" else FLOOR * largest
            error = _distance(ours.get(name), wanted, floor)
            if error > worst or math.isnan(error):
                worst, where = error, f"step {number + 1}, {name}"
            if math.isnan(error):
                return math.inf, where
    return worst, where


def _distance(ours: Tensor | None, wanted: Tensor, floor: float) -> float:
    if ours is None or ours.shape != wanted.shape or ours.dtype != wanted.dtype:
        return float("inf")
    if torch.equal(ours, wanted) or not wanted.numel():
        return 0.0
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return float("inf")
    scale = max(float(wanted.abs().max()), floor, 1e-30)
    return float((ours - wanted).abs().max()) / scale


def _same_bits(found: _Trained, expected: _Trained) -> bool:
    return all(
        ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        for ours, theirs in zip(found.steps, expected.steps, strict=True)
    )


def _finite(trained: _Trained) -> bool:
    return all(
        bool(value.isfinite().all())
        for step in trained.steps
        for name, value in step.items()
        if not name.startswith("buffer ")
    )


def _refused(error: BaseException) -> bool:
    """Tell whether an exception is one of remat's own."""
    return any(kind.__module__.partition(".")[0].startswith("remat") for kind in type(error).mro())


def _failure(error: BaseException) -> tuple[str, str]:
    text = " ".join(str(error).split())
    reason = f"{type(error).__name__}: {text[:400]}"
    return ("refused" if _refused(error) else "foreign"), reason


def _built(build: Callable[[], Built]) -> Built:
    seed_everything(0)
    return build()


def _plain(build: Callable[[], Built], *, peak: bool = True) -> tuple[Built, _Trained]:
    """Train in eager.

    Raises:
        NotRunnable: if that fails, or is not finite.
    """
    try:
        built = _built(build)
        trained = _train(built, peak=peak)
    except NotRunnable:
        raise
    except Exception as error:
        raise NotRunnable(
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    if not _finite(trained):
        raise NotRunnable("the loss or a gradient is not finite")
    return built, trained


def _planned(budget: int, solver: str = "auto", *, groups: bool = False) -> Any:
    """Plan, with all operators in compiled groups that can be: by estimates these are faster."""
    options: dict[str, Any] = {"budget": budget, "solver": solver}
    if groups:
        options |= {"kernels": "inductor", "wait": True, "costs": "estimate"}
    return functools.partial(remat.rematerialize, limit_seconds=PLANNING_SECONDS, **options)


def _compiled(backend: str, model: Any) -> Any:
    """Run a model as TorchDynamo sees it: with its branches, or with its backward graph, too."""
    model.forward = torch.compile(model.forward, backend=backend, dynamic=False)
    return model


def _within(
    build: Callable[[], Built], budget: int, *, groups: bool
) -> tuple[_Trained | None, int, bool, BaseException | None]:
    """Train within a budget, or within the least that remat names when it refuses that."""
    least = False
    for _ in range(4 if groups else 2):  # estimates know no workspace: what they name may grow
        try:
            trained = _train(_built(build), _planned(budget, groups=groups))
        except remat.BudgetTooSmall as error:
            if (least and not groups) or error.smallest_bytes <= budget:
                return None, budget, least, error
            budget, least = int(error.smallest_bytes), True
        except Exception as error:
            return None, budget, least, error
        else:
            return trained, budget, least, None
    return None, budget, least, remat.RematError("the least that is named grows with each try")


def _judge_variant(variant: str, build: Callable[[], Built], *, groups: bool = False) -> Outcome:
    try:
        built, plain = _plain(build)
        _, again = _plain(build, peak=False)
    except NotRunnable as problem:
        return Outcome("not runnable", str(problem), variant)
    facts: dict[str, Any] = {
        "variant": variant,
        "inputs": built.inputs,
        "parameters": sum(parameter.numel() for parameter in built.model.parameters()),
        "plain_peak_bytes": plain.peak_bytes,
    }
    drift, where = _error(again, plain)
    if drift > RIGHT:
        return Outcome("unstable in eager", f"differs from itself by {drift:.1e}, {where}", **facts)
    del built, again
    assert plain.peak_bytes is not None
    ours, budget, least, failure = _within(build, int(FRACTION * plain.peak_bytes), groups=groups)
    facts |= {"budget_bytes": budget, "least": least}
    if failure is not None or ours is None:
        category, reason = _failure(failure or AssertionError("no failure"))
        return Outcome(category, reason, **facts)
    error, where = _error(ours, plain)
    plan = str(ours.plan)
    facts |= {
        "error": error,
        "peak_bytes": ours.peak_bytes,
        "planning_seconds": max(0.0, ours.seconds[0] - min(ours.seconds)),
        "step_seconds": min(ours.seconds),
        "plans": _count_plans(ours.plan, plan),
        "plan": plan[:1500],
    }
    try:
        stored = _train(
            _built(build),
            _planned(PLENTY, solver="store-all"),
            peak=False,
        )
    except Exception as exception:
        category, reason = _failure(exception)
        return Outcome(category, f"storing everything: {reason}", **facts)
    facts["bitwise"] = _same_bits(ours, stored)
    facts["groups"] = _count_groups(ours.plan)
    if error > ROUNDING and groups:  # at the kink of a ReLU, rounding decides on which side one is
        in_double = _error_in_double(build, 2 * budget)
        if in_double <= RIGHT_IN_DOUBLE:
            told = (
                f"differs from eager by {error:.1e}, {where}, in double precision {in_double:.1e}"
            )
            return Outcome("rounding", told, **facts)
    if error > ROUNDING:
        for backend in ("eager", "aot_eager"):
            compiled = _train(_built(build), functools.partial(_compiled, backend), peak=False)
            if _error(ours, compiled)[0] <= ROUNDING:
                told = f"eager differs by {error:.1e} from what torch.compile gives, too, {where}"
                return Outcome("as compiled", told, **facts)
        return Outcome("WRONG", f"differs from eager by {error:.1e}, {where}", **facts)
    if not facts["bitwise"] and not groups:
        off, where = _error(ours, stored)
        return Outcome("not bitwise", f"{off:.1e} from storing everything, {where}", **facts)
    assert ours.peak_bytes is not None
    if ours.peak_bytes > budget:
        over = 100 * (ours.peak_bytes / budget - 1)
        category = "told over" if ours.told_over else "OVER"
        return Outcome(category, f"{over:.1f}% over the budget", **facts)
    return Outcome("right" if error <= RIGHT else "rounding", **facts)


def _error_in_double(build: Callable[[], Built], budget: int) -> float:
    """Find how far compiled groups and eager are apart with all numbers in double precision."""

    def in_double() -> Built:
        built = build()
        to_double = {
            tensor: tensor.detach().double().requires_grad_(tensor.requires_grad)
            for tensor in (*tensors_in([built.args, built.kwargs]), *built.leaves)
            if tensor.is_floating_point()
        }
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: to_double.get(tensor, tensor), (built.args, built.kwargs)
        )
        leaves = tuple(to_double.get(leaf, leaf) for leaf in built.leaves)
        return replace(built, model=built.model.double(), args=args, kwargs=kwargs, leaves=leaves)

    _, plain = _plain(in_double, peak=False)
    ours, _, _, failure = _within(in_double, budget, groups=True)
    return math.inf if ours is None or failure is not None else _error(ours, plain)[0]


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


def _each(case: Case, one: Callable[[str, Callable[[], Built]], Outcome]) -> Outcome:
    """Run all variants of a case; the worst stands for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            variants = case.variants()
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


def judge(case: Case, *, groups: bool = False) -> Outcome:
    """Run a case in this process, by eager kernels or by compiled groups of operators."""
    return _each(case, functools.partial(_judge_variant, groups=groups))


def _eager_variant(variant: str, build: Callable[[], Built]) -> Outcome:
    try:
        built, trained = _plain(build, peak=False)
    except NotRunnable as error:
        return Outcome("not runnable", str(error), variant)
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
