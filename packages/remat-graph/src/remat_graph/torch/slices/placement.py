"""How a call runs slice by slice: where each tensor that it reads or makes stands.

The calculus is that of sharding (DTensor's Shard, Replicate and Partial). A tensor is *sliced*
along an axis, *whole* (each slice reads, or makes, the same), or *summed* (each slice makes an
addend). All that is sliced in one run is cut at the same fractions, so that an axis of 6 and one of
3 are cut together into thirds: a run has so many `units`, the length of each sliced axis is a
multiple of them, and a slice is a range of units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat_graph.torch.calls import Call, TensorFacts, Variable

__all__ = [
    "SUMMED",
    "WHOLE",
    "Place",
    "Placement",
    "Reading",
    "Rule",
    "Size",
    "Sliced",
    "Summed",
    "Whole",
]


@dataclass(frozen=True, slots=True)
class Sliced:
    """Cut along an axis, which `joined` axes in front of it may be cut with as one.

    A slice then has one row on each of these, and all its rows on `axis`.
    """

    axis: int
    joined: int = 0

    @property
    def first(self) -> int:
        """The first of the axes that are cut as one."""
        return self.axis - self.joined

    def length(self, shape: Sequence[int]) -> int:
        """Give the rows that a tensor of this shape is cut into at most."""
        return math.prod(shape[self.first : self.axis + 1])

    def __str__(self) -> str:
        """Name it in a sentence."""
        axes = f"axes {self.first} to" if self.joined else "axis"
        return f"sliced along {axes} {self.axis}"


@dataclass(frozen=True, slots=True)
class Whole:
    """The same for each slice."""

    def __str__(self) -> str:
        """Name it in a sentence."""
        return "whole"


@dataclass(frozen=True, slots=True)
class Summed:
    """The sum of what slices make; divided by the whole of the result `over`, if that is given."""

    over: int | None = None

    def __str__(self) -> str:
        """Name it in a sentence."""
        return "summed"


Place = Sliced | Whole | Summed
WHOLE, SUMMED = Whole(), Summed()


@dataclass(frozen=True, slots=True)
class Size:
    """A number of an argument, or of a list at a position; with the joined ones in front of it."""

    argument: str
    position: int | None = None
    joined: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """One way of running a call slice by slice.

    `inputs` are the places of the variables among its arguments, in the order of `Call.variables`;
    `outputs` those of its results. `sizes` are the numbers among the arguments that are lengths
    along the cut. `replaced` are arguments that
    each slice takes in place of those of the call. Results in `by_share` are multiplied by the
    slice's share of the whole, as where the call divides by a count of elements.
    """

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    sizes: tuple[Size, ...] = ()
    replaced: tuple[tuple[str, Any], ...] = ()
    by_share: frozenset[int] = frozenset()

    @property
    def is_sliced(self) -> bool:
        """Whether a tensor is cut, not summed alone."""
        return any(isinstance(place, Sliced) for place in (*self.inputs, *self.outputs))

    def lengths(self, call: Call, facts: Mapping[str, TensorFacts]) -> list[int]:
        """List the lengths along the cut, of all tensors that are sliced and known."""
        names = (*call.variables, *call.results)
        return [
            place.length(facts[name].shape)
            for name, place in zip(names, (*self.inputs, *self.outputs), strict=True)
            if isinstance(place, Sliced) and name is not None
        ]

    def units(self, call: Call, facts: Mapping[str, TensorFacts]) -> int:
        """Give the most units that a call can be cut into; 1 if it cannot."""
        numbers = [_total(call.argument(each.argument), each) for each in self.sizes]
        return math.gcd(*self.lengths(call, facts), *(each for each in numbers if each > 0)) or 1

    def call_for(self, call: Call, count: int, units: int) -> Call:
        """Make the call that runs on `count` of all units."""
        changed = dict(self.replaced)
        for each in self.sizes:
            size = changed.get(each.argument, call.argument(each.argument))
            total = _total(size, each)
            own = total * count // units if total > 0 else -1
            if each.position is None:
                changed[each.argument] = own
            else:
                at = each.position % len(size)
                front = (*size[: at - each.joined], *[1] * each.joined)
                changed[each.argument] = [*front, own, *size[at + 1 :]]
        return call.with_arguments(changed) if changed else call


def _total(value: Any, size: Size) -> int:
    """Give the length that a number, or several as one, stands for; -1 if it is left to torch."""
    if size.position is None:
        return int(value)
    at = size.position % len(value)
    numbers = value[at - size.joined : at + 1]
    return -1 if -1 in numbers else math.prod(numbers)


class Reading:
    """A call as a rule reads it: arguments by their names in the schema, and shapes of tensors."""

    def __init__(self, call: Call, facts: Mapping[str, TensorFacts]) -> None:
        self.call = call
        self._facts = facts

    def __getitem__(self, name: str) -> Any:
        """Give an argument, or its default."""
        return self.call.argument(name)

    @property
    def tensors(self) -> Iterator[tuple[str, TensorFacts]]:
        """The arguments that are tensors, and what is known of them."""
        for name in self.call.argument_names:
            facts = self.facts(name)
            if facts is not None:
                yield name, facts

    def facts(self, name: str) -> TensorFacts | None:
        """Give the facts of an argument that is a tensor; `None` if it is none."""
        argument = self[name]
        return self.facts_of(argument) if isinstance(argument, Variable) else None

    def facts_of(self, variable: Variable) -> TensorFacts:
        """Give the facts of a tensor."""
        return self._facts[variable.name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Give the shape of an argument that is a tensor."""
        return self.facts_of(self[name]).shape

    @property
    def has_axes(self) -> bool:
        """Whether the schema lets the call name the axes that it goes along."""
        return any(each.name == "dim" for each in self.call.target._schema.arguments)

    @property
    def keeps_axes(self) -> bool:
        """Whether reduced axes stay, with a length of one."""
        names = {each.name for each in self.call.target._schema.arguments}
        return "keepdim" in names and bool(self["keepdim"])

    def rank(self, name: str) -> int:
        """Count the dimensions of an argument that is a tensor."""
        return len(self.shape(name))

    def axis(self, name: str, rank: int) -> int:
        """Give an argument that counts dimensions, from the front."""
        axis = int(self[name])
        return axis + rank if axis < 0 else axis

    def result(self, result: int = 0) -> TensorFacts | None:
        """Give the facts of a result, if anything reads it."""
        name = self.call.results[result]
        return None if name is None else self._facts.get(name)

    def placement(
        self,
        places: Mapping[str, int | Place | Sequence[int | Place]],
        outputs: Sequence[int | Place],
        *,
        sizes: Sequence[Size] = (),
        replaced: Mapping[str, Any] | None = None,
        by_share: Sequence[int] = (),
    ) -> Placement:
        """Make a placement: an axis stands for `Sliced`, a tensor that is not named is whole.

        The places of a list of tensors are a list.
        """
        inputs: list[Place] = []
        for name in self.call.argument_names:
            place, argument = places.get(name, WHOLE), self[name]
            if isinstance(place, Sequence):
                pairs = zip(argument, place, strict=True)
                inputs += [_place(each) for item, each in pairs if isinstance(item, Variable)]
            else:
                several = argument if isinstance(argument, (list, tuple)) else [argument]
                inputs += [_place(place) for item in several if isinstance(item, Variable)]
        places_of_results = [_place(place) for place in outputs]
        places_of_results += [WHOLE] * (len(self.call.results) - len(places_of_results))
        return Placement(
            tuple(inputs),
            tuple(places_of_results),
            tuple(sizes),
            tuple((replaced or {}).items()),
            frozenset(by_share),
        )


def _place(place: int | Place) -> Place:
    return Sliced(place) if isinstance(place, int) else place


# What lists the ways of running a call slice by slice.
Rule = Callable[[Reading], Iterator[Placement]]
