"""Steps of training, what they leave behind and take, and how far two trainings are apart."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import remat
from counting import counted
from matrix_cases.case import Built, seed_everything, tensors_in
from remat_exec import measure_peak

__all__ = ["STEPS", "Measured", "Trained", "error", "is_finite", "same_bits", "train"]

STEPS = 3
MORE_STEPS = 4  # after as many over the budget in a row without a plan, the next is refused
_Sizes = tuple[tuple[int, ...], ...]
FLOOR = 1e-4  # of the largest gradient of the model: what is smaller is noise of a sum to zero


@dataclass(frozen=True, slots=True)
class Measured:
    """A step after the training: its peak and its budget, in bytes, and what was told of it.

    The budget is the most that a plan had so far, if there was one. `told_over` are the warnings of
    this step and the one after it, which is of its sizes, too; `told_before` those of the steps of
    its sizes in the training. Those of other sizes are not among them.
    """

    peak_bytes: int
    budget_bytes: int | None
    told_over: tuple[str, ...] = ()
    told_before: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """The peak as a share of the budget; without one, in bytes."""
        return self.peak_bytes / (self.budget_bytes or 1)


@dataclass(slots=True)
class Trained:
    """Losses, gradients and buffers of each step, by name; and what the measured steps took.

    `counts` says what was traced, rehearsed and solved in the steps before those, and `ran_plain`
    which of these ran plain, to learn what a fraction of plain's peak is.
    """

    steps: list[dict[str, Tensor]] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    ran_plain: set[int] = field(default_factory=set)
    plan: Any = None

    @property
    def nearest(self) -> Measured | None:
        """The measured step that is nearest to its budget; without budgets, the largest."""
        return max(self.measured, key=lambda each: each.share, default=None)


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


def _take_over(module: torch.nn.Module, snapshot: dict[str, Tensor]) -> None:
    """Give a model the gradients and buffers of a step of another training."""
    for name, parameter in module.named_parameters():
        parameter.grad = snapshot[name].clone()
    for name, buffer in module.named_buffers():
        buffer.copy_(snapshot[f"buffer {name}"])


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
    taken_over: Mapping[int, dict[str, Tensor]] = MappingProxyType({}),
) -> Trained:
    """Train one model by a step for each of its calls; each is then run once more and measured.

    Of the steps that are `taken_over` the gradients and buffers are given, as those of one that ran
    plain, by other kernels. They run all the same: which of the later sizes are traced with symbols
    depends on all that were seen.

    Where regions are planned in each step, it is run until there is a plan, or it is refused.
    """
    trained = Trained()
    module = calls[0].model
    model = module if wrap is None else wrap(module)
    budgets: set[int] = set()  # a fraction is of the most that plain took
    told: dict[_Sizes, list[str]] = {}
    last: _Sizes | None = None

    def prepare(number: int) -> None:
        module.zero_grad(set_to_none=True)
        for leaf in calls[number].leaves:
            leaf.grad = None
        seed_everything(1000 + number)

    def step(number: int) -> Tensor:
        nonlocal last
        call, before = calls[number], last
        last = _sizes(call)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = model(*call.args, **call.kwargs)
            of_forward = len(caught)
            loss = call.loss(output)
            loss.backward()  # type: ignore[no-untyped-call]
        for place, each in enumerate(caught):
            if issubclass(each.category, remat.BudgetWarning):
                text = str(each.message)
                # What a step took may be told when the next one begins.
                is_late = place < of_forward and " took " in text
                told.setdefault(before if is_late and before else last, []).append(text)
        budgets.add(getattr(getattr(model, "plan", None), "budget_bytes", 0))
        return loss.detach()

    with counted() as counts:
        for number, call in enumerate(calls):
            prepare(number)
            so_far = counts["ran plain"]
            start = time.perf_counter()
            loss = step(number)
            if counts["ran plain"] > so_far:
                trained.ran_plain.add(number)
            trained.seconds.append(time.perf_counter() - start)
            if number in taken_over:
                _take_over(module, taken_over[number])
            trained.steps.append(taken_over.get(number) or _snapshot(call, loss))
            _descend(call)
    trained.counts = dict(counts)
    trained.plan = getattr(model, "plan", None)
    numbers = {id(call): number for number, call in enumerate(calls) if peak}.values()
    before, told = told, {}
    peaks: list[tuple[int, int, int | None]] = []
    for number in numbers:
        for _ in range(MORE_STEPS):
            if wrap is not None and not max(budgets):
                prepare(number)
                step(number)
        prepare(number)
        with measure_peak("cpu") as taken:
            step(number)
        peaks.append((number, taken.peak_bytes, max(budgets) or None))
        prepare(number)
        step(number)  # what is seen in a step may be told in the next
    for number, peak_bytes, budget in peaks:
        after, earlier = (tuple(each.get(_sizes(calls[number]), ())) for each in (told, before))
        trained.measured.append(Measured(peak_bytes, budget, after, earlier))
    return trained


def _sizes(call: Built) -> _Sizes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in([call.args, call.kwargs]))


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
