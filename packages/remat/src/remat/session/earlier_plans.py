"""Which plans that were made before serve another graph, and with room for its loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from remat.planning.planner import scalar_bytes
from remat.planning.solving import have_same_ops
from remat.planning.task import RunnablePlan
from remat_graph import Graph, simulate
from remat_graph.torch import Capture, LossCost

__all__ = ["has_room", "have_same_costs", "is_equal", "kin_of", "with_kin"]


def kin_of(captured: Capture, planned: Sequence[RunnablePlan]) -> list[RunnablePlan]:
    """Find the plans of graphs with the ops and outputs of this one, for the same gradients."""
    outputs = len(captured.program.returned)
    return [
        other
        for other in planned
        if other.capture.missing == captured.missing
        and len(other.capture.program.returned) == outputs
        and have_same_ops(
            other.capture.graph,
            captured.with_released_outputs(other.capture.released_outputs).graph,
        )
    ]


def with_kin(
    captured: Capture, planned: Sequence[RunnablePlan], *, grouped: bool
) -> tuple[Capture, list[RunnablePlan]]:
    """Give a capture as known plans have it, and those plans; as it is, if there are none.

    The layouts that were traced may have been faster within the budget. Where it is to be
    `grouped`, it is held against plans with compiled groups. In slices it is given for plans of the
    same sizes alone.
    """
    for program in _programs_as(captured, planned, grouped=grouped):
        for each in (program, program.in_traced_layouts()):
            kin = [
                other
                for other in kin_of(each, planned)
                if not each.sliced or is_equal(other.capture.graph, _with_loss_of(each, other))
            ]
            if kin:
                return each, kin
    return captured, []


def _programs_as(
    captured: Capture, planned: Sequence[RunnablePlan], *, grouped: bool
) -> Iterator[Capture]:
    """Yield a capture in the slices and groups that plans have, first without slices.

    Slices are those of the plans of its own ops.
    """
    if not grouped:
        yield captured
    order = captured.without_alternatives().program.order
    ways = dict.fromkeys(
        (other.capture.sliced, other.capture.unfused, other.capture.gives_again)
        for other in planned
        if grouped is (other.capture.unfused is not None)
        if not other.capture.sliced or other.capture.without_alternatives().program.order == order
    )
    there = (way for way in ways if captured.has_cuts(way[0]))
    for sliced, unfused, again in sorted(there, key=lambda way: bool(way[0])):
        program = captured.in_slices(sliced) if sliced else captured
        if unfused is not None:
            if program.may_be_in_groups(unfused):
                yield program.in_groups(unfused, give_again=again)
        elif sliced:
            yield program


def _with_loss_of(captured: Capture, other: RunnablePlan) -> Graph:
    released = captured.with_released_outputs(other.capture.released_outputs)
    return released.with_loss(other.capture.loss).graph


def has_room(planned: RunnablePlan, loss: LossCost) -> bool:
    """Whether a plan stays within its budget where a loss takes so much."""
    capture, plan = planned.capture, planned.plan
    graphs = capture.graph, capture.with_loss(loss).graph
    before, after = (simulate(graph, plan.schedule).peak_bytes for graph in graphs)
    unforeseen = max(0, (plan.measured_peak_bytes or 0) - before)
    aside = scalar_bytes(capture.program.device.type)
    return after + unforeseen + aside <= plan.budget_bytes


def is_equal(one: Graph, other: Graph) -> bool:
    """Whether two graphs are the same but for costs."""
    return one.values == other.values and have_same_costs(one, other)


def have_same_costs(one: Graph, other: Graph) -> bool:
    """Whether the operators of two graphs of as many ops run on the same sizes."""
    return all(a.equivalence == b.equivalence for a, b in zip(one.ops, other.ops, strict=True))
