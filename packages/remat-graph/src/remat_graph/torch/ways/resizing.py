"""A cut of a program, in the program of the same trace for other sizes.

What a cut is made of, and in which order it can run, depends on no size; whether each call can be
cut so does. So the rules of its calls are asked again, with the facts of the other sizes: they must
list the same placements, and allow as many units as the axis is long there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from remat_graph.torch.calls import Body, Call, TensorFacts
from remat_graph.torch.operators import placements
from remat_graph.torch.program import Program
from remat_graph.torch.ways.cuts import Cut
from remat_graph.torch.ways.slice_by_slice import SlicedBody
from remat_graph.torch.ways.stretches import Stretch
from remat_graph.torch.ways.unit_tangent import for_unit_tangent

__all__ = ["Resizer"]


class Resizer:
    """Gives cuts of the program of some sizes, of those that it has for others."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._made_by = program.calls_by_variable()

    def resized(self, cut: Cut) -> Cut | None:
        """Give the same cut of this program; `None` where rules do not allow it for its sizes."""
        forward = self._stretch(cut.forward)
        backward = forward and self._stretch(cut.backward, forward.body.units)
        if forward is None or backward is None:
            return None
        if cut.unit is None:
            return replace(cut, forward=forward, backward=backward)
        unit = for_unit_tangent(self._program, forward.body, backward.body)
        if unit is None:
            return None
        return replace(cut, forward=forward, backward=backward, unit=unit)

    def _stretch(self, stretch: Stretch, units: int | None = None) -> Stretch | None:
        """Give a stretch that is cut into so many units, or as many as all that is sliced allows.

        That must be what it was cut into where it was found.
        """
        body = stretch.body
        facts = {name: self._program.facts[name] for name in body.facts}
        calls = [self._call(call, facts) for call in body.body.calls]
        resized = [call for call in calls if call is not None]
        if len(resized) < len(calls):
            return None
        for call, way in zip(resized, body.placements, strict=True):
            if way not in placements(call, facts):
                return None
        most = _most_units(body, resized, facts)
        if units is None:
            found = _most_units(body, body.body.calls, body.facts)
            units = most if found == body.units else None
        if units is None or most % units:
            return None
        inside = Body(body.body.inputs, tuple(resized), body.body.outputs)
        return replace(stretch, body=replace(body, body=inside, units=units, facts=facts))

    def _call(self, call: Call, facts: Mapping[str, TensorFacts]) -> Call | None:
        """Give a call of a stretch for these sizes: it may read what equals what is read there."""
        made = next((name for name in call.results if name is not None), None)
        own = None if made is None else self._made_by.get(made)
        if own is None or own.target is not call.target or own.results != call.results:
            return None
        reads = call.variables
        if len(reads) != len(own.variables):
            return None
        program = self._program
        for read, other in zip(reads, own.variables, strict=True):
            if read != other and (
                program.storage.get(read) != program.storage.get(other)
                or facts[read] != program.facts.get(other)
            ):
                return None
        return own if reads == own.variables else own.of(reads, own.results)


def _most_units(
    body: SlicedBody, calls: tuple[Call, ...] | list[Call], facts: Mapping[str, TensorFacts]
) -> int:
    """Give the most units that all calls of a body can be cut into."""
    pairs = zip(calls, body.placements, strict=True)
    return math.gcd(*(way.units(call, facts) for call, way in pairs if way.is_sliced))
