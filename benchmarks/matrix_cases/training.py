"""Steps of training, what they leave behind and take, and how far two trainings are apart."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import remat
from counting import counted
from matrix_cases.case import Built, seed_everything
from remat_exec import measure_peak

__all__ = ["STEPS", "Trained", "error", "is_finite", "same_bits", "train"]

STEPS = 3
MORE_STEPS = 4  # after as many over the budget in a row without a plan, the next is refused
FLOOR = 1e-4  # of the largest gradient of the model: what is smaller is noise of a sum to zero


@dataclass(slots=True)
class Trained:
    """Losses, gradients and buffers of each step, by name; and what the measured steps took.

    `peaks` are of these, each with the budget: the most that a plan had so far, if there was one.
    `told_over` are the warnings of them, and `told_before` those of the steps before, in which
    `counts` says what was traced, rehearsed and solved.
    """

    steps: list[dict[str, Tensor]] = field(default_factory=list)
    peaks: list[tuple[int, int | None]] = field(default_factory=list)
    told_over: list[str] = field(default_factory=list)
    told_before: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    plan: Any = None

    @property
    def peak_bytes(self) -> int | None:
        """The peak that is nearest to its budget, or the largest of those without one."""
        return self._nearest[0]

    @property
    def budget_bytes(self) -> int | None:
        """The budget of that step."""
        return self._nearest[1]

    @property
    def _nearest(self) -> tuple[int | None, int | None]:
        return max(self.peaks, default=(None, None), key=lambda peak: peak[0] / (peak[1] or 1))


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


def train(
    calls: Sequence[Built],
    wrap: Callable[[Any], Any] | None = None,
    *,
    peak: bool = True,
) -> Trained:
    """Train one model by a step for each of its calls; each is then run once more and measured.

    Where regions are planned in each step, it is run until there is a plan, or it is refused.
    """
    trained = Trained()
    module = calls[0].model
    model = module if wrap is None else wrap(module)
    budgets: set[int] = set()  # a fraction is of the most that plain took

    def prepare(number: int) -> None:
        module.zero_grad(set_to_none=True)
        for leaf in calls[number].leaves:
            leaf.grad = None
        seed_everything(1000 + number)

    def step(number: int) -> Tensor:
        call = calls[number]
        loss = call.loss(model(*call.args, **call.kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        budgets.add(getattr(getattr(model, "plan", None), "budget_bytes", 0))
        return loss.detach()

    with warnings.catch_warnings(record=True) as told, counted() as counts:
        warnings.simplefilter("always")
        for number, call in enumerate(calls):
            prepare(number)
            start = time.perf_counter()
            loss = step(number)
            trained.seconds.append(time.perf_counter() - start)
            trained.steps.append(_snapshot(call, loss))
            _descend(call)
    trained.counts = dict(counts)
    trained.told_before = _budget_warnings(told)
    trained.plan = getattr(model, "plan", None)
    for number in {id(call): number for number, call in enumerate(calls) if peak}.values():
        for _ in range(MORE_STEPS):
            if wrap is not None and not max(budgets):
                prepare(number)
                step(number)
        prepare(number)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with measure_peak("cpu") as taken:
                step(number)
            trained.peaks.append((taken.peak_bytes, max(budgets) or None))
            prepare(number)
            step(number)  # what is seen in a step may be told in the next
        trained.told_over += _budget_warnings(told)
    return trained


def _budget_warnings(told: Sequence[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in told if issubclass(each.category, remat.BudgetWarning)]


def error(found: Trained, expected: Trained) -> tuple[float, str]:
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
            off = _distance(ours.get(name), wanted, floor)
            if off > worst or math.isnan(off):
                worst, where = off, f"step {number + 1}, {name}"
            if math.isnan(off):
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


def same_bits(found: Trained, expected: Trained) -> bool:
    """Tell whether two trainings left the same bits behind in each step."""
    return all(
        ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        for ours, theirs in zip(found.steps, expected.steps, strict=True)
    )


def is_finite(trained: Trained) -> bool:
    """Tell whether all losses and gradients are numbers."""
    return all(
        bool(value.isfinite().all())
        for step in trained.steps
        for name, value in step.items()
        if not name.startswith("buffer ")
    )
