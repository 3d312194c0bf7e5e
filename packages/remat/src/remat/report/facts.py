"""A plan in words: rows of a name and a text, as they are printed and shown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from remat.budgets.plain_step import Basis
from remat.plans.plan import Plan, least_exact, run_of
from remat.plans.reads import compared
from remat.report.words import mib, mib_or_dash
from remat_graph import Graph, Numerics, Schedule, Stage, leaves, printable

__all__ = ["facts_of", "title_of"]

_BASES: dict[Basis, str] = {
    "measured": "",
    "in proportion": ", by one step that was measured, in proportion to what regions keep",
    "predicted": ", predicted: a plain step could not be measured",
}


_MOST_NAMES = 8


def title_of(plan: Plan) -> str:
    """Give the heading of a plan."""
    count = len(plan.calls)
    if plan.is_one_region:
        return "remat plan"
    return f"remat plan of {count} calls of regions" if count > 1 else "remat plan of one call"


def facts_of(plan: Plan) -> list[tuple[str, str]]:
    """List what is known of a plan."""
    measured, bound = plan.measured_peak_bytes, plan.bound_overhead
    count = sum(len(compared(graph, schedule)) for graph, schedule in plan.runs)
    many = f"{count} tensors that eager would not keep, before the backward reads them"
    return [
        *(_operations(plan) if plan.is_one_region else ()),
        ("budget", mib(plan.budget_bytes)),
        ("peak, predicted", mib(plan.predicted_peak_bytes)),
        ("peak, measured", "not measured" if measured is None else mib(measured)),
        ("plain autograd", mib_or_dash(plan.plain_peak_bytes) + _BASES[plan.plain_basis]),
        ("storing everything", mib(plan.store_all_peak_bytes)),
        ("overhead, predicted", _percent(plan.predicted_overhead)),
        ("overhead, at least", "unknown" if bound is None else _percent(bound)),
        *(("not certified", doubt) for doubt in [plan.doubt] if doubt),
        *(("made another way", text) for run in plan.runs for text in _other_ways(*run)),
        *(("in no group", text) for text in _left_out(plan)),
        *(("made when read", text) for text in _deferred(plan)),
        *(("gradients leave", text) for text in _leaving(plan)),
        *([("compared", many)] if count else ()),
        *(_solver(plan) if plan.is_one_region else _regions(plan)),
    ]


def _left_out(plan: Plan) -> Iterator[str]:
    """Name what is not compiled, though it was asked for."""
    if plan.no_groups is not None:
        yield f"all operations: {plan.no_groups}"
    names = [printable(name) for name in plan.left_out]
    if names:
        more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
        listed = ", ".join((*names[:_MOST_NAMES], *more))
        yield f"{len(names)} operations, slower compiled or not compilable: {listed}"


def _deferred(plan: Plan) -> Iterator[str]:
    """Say which outputs no step makes."""
    sizes = [size for kind in plan.kinds for _, size in kind.deferred]
    if sizes:
        yield f"{len(sizes)} of the outputs, {mib(sum(sizes))}, not made in a step"


def _leaving(plan: Plan) -> Iterator[str]:
    """Say which gradients are given out to stay no longer."""
    graph = plan.graph
    left = {v for op in graph.ops if leaves(op.name) for v in op.inputs} - graph.resident
    if left:
        size = sum(graph.value_by_name[value].size_bytes for value in left)
        yield f"{len(left)}, {mib(size)}, at once"


def _operations(plan: Plan) -> Iterator[tuple[str, str]]:
    ops = plan.graph.ops
    forward = sum(op.stage is Stage.FORWARD for op in ops)
    again = plan.recomputations
    yield "operations", f"{forward} forward, {len(ops) - forward} backward, {again} recomputed"


def _solver(plan: Plan) -> Iterator[tuple[str, str]]:
    solved = f"{plan.solver} ({plan.status.value}), {plan.solve_seconds:.1f} s"
    yield "solver", f"{solved} after {plan.capture_seconds:.1f} s of capture"


def _regions(plan: Plan) -> Iterator[tuple[str, str]]:
    runs = Counter((name, option.kept_bytes, option.peak_bytes) for name, option in plan.regions)
    for (name, kept, peak), count in runs.items():
        times = f"{count} times " if count > 1 else ""
        yield printable(name), f"{times}keeps {mib(kept)}, peak {mib(peak)}"
    for reason in plan.breaks:
        yield "break", printable(" ".join(reason.split()))


# As a capture names groups, ops in slices, and those beside them.
_COMPILED = "__fused"
_IN_SLICES = re.compile(r"(__with_gradients)?__in_(\d+)_slices$")
_BESIDE_SLICES = re.compile(r"__(scaled|total)$")


def _other_ways(graph: Graph, schedule: Schedule) -> Iterator[str]:
    """Say what runs by alternatives, what is kept packed, and how exact that is."""
    ops = run_of(graph, schedule)
    slices = [match for op in ops if (match := _IN_SLICES.search(op.name))]
    if slices:
        counts = Counter(match[2] for match in slices)
        numbers = ", ".join(f"{count} in {number}" for number, count in counts.items())
        with_gradients = sum(match[1] is not None for match in slices)
        also = f" ({with_gradients} make gradients in the forward)" if with_gradients else ""
        yield f"{len(slices)} stretches in slices, {numbers}{also}, {Numerics.ROUNDING.value}"
    laid = sum(
        op.owed
        and op.numerics is Numerics.ROUNDING
        and not (_IN_SLICES.search(op.name) or _BESIDE_SLICES.search(op.name))
        and not op.name.endswith(_COMPILED)
        for op in ops
    )
    groups = sum(op.name.endswith(_COMPILED) for op in ops)
    if groups:
        yield f"{groups} compiled groups of operations, {Numerics.ROUNDING.value}"
    if laid:
        yield f"{laid} operations in channels_last, {Numerics.ROUNDING.value}"
    chosen = [op for op in ops if not op.owed]
    if not chosen:
        return
    packed = [op for op in ops if op.optional]
    size = graph.value_by_name
    kept = sum(size[v].size_bytes for op in packed for v in op.outputs)
    yield (
        f"{len(chosen) - len(packed)} operations, {len(packed)} values kept packed "
        f"({mib(kept)}), {least_exact(chosen)}"
    )


def _percent(share: float) -> str:
    return f"{round(100 * share, 2) + 0.0:.2f}%"
