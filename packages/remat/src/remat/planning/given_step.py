"""A plan of a step of several regions that is handed over: `rematerialize(model, plan=...)`.

Each region of the model is looked for among those of the plan by the canonical hash of the outline
of its graph, and runs by their schedules, by positions instead of names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat.errors import PlanMismatch
from remat.plans.outlines import Outline
from remat.plans.step import StepPlan
from remat_graph import Graph, canonical_hash
from remat_graph.torch import Capture
from remat_solvers.step import RegionFront, known_front, measure_option

__all__ = ["GivenStep"]


@dataclass(frozen=True, slots=True)
class GivenStep:
    """A plan of a step; `name` is told in errors."""

    plan: StepPlan
    name: str

    @property
    def budget_bytes(self) -> int | None:
        """The budget that it was made for."""
        return self.plan.budget_bytes

    @property
    def pattern(self) -> tuple[int, ...]:
        """The kind of each call of the step."""
        return tuple(kind for _, kind in self.plan.calls)

    def fit(self, kind: int, captured: Capture) -> tuple[Capture, RegionFront] | None:
        """Give the options of a kind of regions for a capture; `None` if it is of another kind."""
        of = self.plan.kinds[kind]
        there = Outline.of(of.front.graph)
        for variant in _variants(captured, of.missing):
            here = Outline.of(variant.graph)
            if there.hash == here.hash:
                return variant, _translated(of.front, there, variant.graph, here)
        return None

    def mismatch(self, position: int, name: str, captured: Capture) -> PlanMismatch:
        """Say how the region of a call differs from that of the plan in this place."""
        calls = self.plan.calls
        told = f"it has {len(calls)} calls of regions"
        if position < len(calls):
            its_name, kind = calls[position]
            of = self.plan.kinds[kind]
            graph = _variants(captured, of.missing)[-1].graph
            differs = Outline.of(of.front.graph).difference(Outline.of(graph), "it", "the model")
            told = f"its call {position} is of {its_name[:100]!r}, with {differs}"
        return PlanMismatch(
            f"{self.name} has no plan for the region of call {position} of the step, {name!r}: "
            f"{told}. Make the plan again for this model and call, or leave plan= out"
        )

    def difference(self, pattern: Sequence[int], names: Sequence[str]) -> str | None:
        """Say where the calls of a step differ from those of the plan; `None` if they do not."""
        mine = self.pattern
        if mine == tuple(pattern):
            return None
        at = next(
            (at for at, pair in enumerate(zip(pattern, mine, strict=False)) if len(set(pair)) > 1),
            min(len(pattern), len(mine)),
        )
        here = repr(names[at]) if at < len(names) else "missing"
        there = repr(self.plan.calls[at][0][:100]) if at < len(mine) else "missing"
        return (
            f"the step has {len(pattern)} calls of regions, {self.name} {len(mine)}; call {at} is "
            f"{here} in the step, {there} in {self.name}"
        )


def _variants(captured: Capture, missing: frozenset[int]) -> tuple[Capture, ...]:
    """Give a capture as it is, and without the gradients that a plan takes not to come."""
    if not missing or missing == captured.missing:
        return (captured,)
    if not missing < set(captured.program.tangents.values()) | captured.missing:
        return (captured,)
    return captured, captured.variant(missing).with_loss(captured.loss)


def _translated(front: RegionFront, there: Outline, graph: Graph, here: Outline) -> RegionFront:
    """Say options in the names of another graph, and measure them there, in the same order.

    What was proved holds where costs are the same.
    """
    same = canonical_hash(front.graph) == canonical_hash(graph)
    options = tuple(
        measure_option(
            graph,
            there.translate(option.schedule, here),
            lower_bound=option.lower_bound if same else None,
        )
        for option in front.options
    )
    known = front if same else known_front(graph, ())
    return replace(known, graph=graph, options=options)
