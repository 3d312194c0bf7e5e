"""Which outputs of a model are computed from which others of its outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter

from remat_graph.torch import Program

__all__ = ["InnerReads", "inner_reads"]


@dataclass(frozen=True, slots=True)
class InnerReads:
    """Outputs that others are computed from: positions in `program.outputs`, by one in `returned`.

    `by` has those that what stands there is computed from, the nearest alone, `of` those that are
    made of it and read so. Keys are in the order of computation. `of_inputs` are those
    that are views of inputs.
    """

    by: Mapping[int, tuple[int, ...]]
    of: Mapping[int, tuple[int, ...]]
    of_inputs: tuple[int, ...]


def inner_reads(program: Program, differentiable: Collection[int]) -> InnerReads | None:
    """Find what is computed from outputs with gradients, where there are several.

    Positions in `program.returned` are looked at that are `differentiable`. What is a view of the
    same buffer is made outside, as a view of the output that it is computed from.
    """
    outputs = program.outputs
    whole = [
        program.returned.index(output.base) if output.kind in ("fresh", "view") else None
        for output in outputs
    ]
    before: dict[int, set[int]] = {}
    for reader, output in zip(whole, outputs, strict=True):
        if reader is not None and reader in differentiable:
            others = {at for at in output.computed_from if outputs[at].kind != "input"}
            before.setdefault(reader, set()).update(at for at in others if whole[at] != reader)
    read = set().union(*before.values())
    if len(before) < 2 and not read:
        return None
    beyond = {at: set(outputs[at].computed_from) for at in read}
    order = {reader: [whole[at] for at in others] for reader, others in before.items()}
    by, of = {}, {}
    for position in TopologicalSorter(order).static_order():
        if position is not None:
            nearest = before[position].difference(*(beyond[at] for at in before[position]))
            by[position] = tuple(sorted(nearest))
            of[position] = tuple(sorted(at for at in read if whole[at] == position))
    return InnerReads(by, of, tuple(sorted(at for at in read if whole[at] is None)))
