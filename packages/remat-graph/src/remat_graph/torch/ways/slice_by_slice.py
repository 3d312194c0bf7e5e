"""Running a body slice by slice, so that what is inside exists one slice at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from remat_graph.torch.calls import Body, Call, TensorFacts, Variable
from remat_graph.torch.operators import operator_of
from remat_graph.torch.slices.placement import WHOLE, Place, Placement, Sliced, Summed

__all__ = ["SlicedBody"]


@dataclass(frozen=True, slots=True)
class SlicedBody:
    """A body with a placement for each of its calls, and the units into which all is cut.

    `facts` are those of its outputs, whole.
    """

    body: Body
    placements: tuple[Placement, ...]
    units: int
    facts: Mapping[str, TensorFacts]

    @property
    def places(self) -> dict[str, Place]:
        """Where each variable stands; inputs that are read whole by some are whole."""
        found: dict[str, Place] = {}
        for call, placement in zip(self.body.calls, self.placements, strict=True):
            found.update(zip(call.variables, placement.inputs, strict=True))
            made = zip(call.results, placement.outputs, strict=True)
            found.update((name, place) for name, place in made if name is not None)
        return found

    def run(self, given: Sequence[torch.Tensor], bounds: Sequence[int]) -> list[torch.Tensor]:
        """Give the outputs, made in slices of units from each of `bounds` to the next."""
        places = self.places
        inputs = dict(zip(self.body.inputs, given, strict=True))
        outputs = _Outputs(self, places)
        for start, stop in pairwise(bounds):
            env: dict[str, Any] = {
                name: _part(tensor, places.get(name, WHOLE), self.units, start, stop)
                for name, tensor in inputs.items()
            }
            for call, made in self._run_slice(env, stop - start):
                outputs.note(call, made)
            outputs.take(env, start, stop)
        return outputs.finished()

    def _run_slice(self, env: dict[str, Any], count: int) -> Iterator[tuple[Call, Sequence[Any]]]:
        share = count / self.units
        for call, placement in zip(self.body.calls, self.placements, strict=True):
            sliced = placement.call_for(call, count, self.units)
            args, kwargs = pytree.tree_map_only(
                Variable, lambda item: env[item.name], (sliced.args, dict(sliced.kwargs))
            )
            made = (operator_of(call.target).runs_as or call.target)(*args, **kwargs)
            parts = list(made) if call.sequence else [made]
            for result in placement.by_share:
                parts[result] = parts[result] * share
            env.update((n, part) for n, part in zip(call.results, parts, strict=True) if n)
            yield call, parts


def _part(tensor: torch.Tensor, place: Place, units: int, start: int, stop: int) -> torch.Tensor:
    """Take a slice of a tensor, a copy only of axes that are cut as one and lie apart."""
    if not isinstance(place, Sliced):
        return tensor
    step = place.length(tensor.shape) // units
    rows = (stop - start) * step
    flat = _flat(tensor, place)
    if flat is not None:
        part = flat.narrow(place.first, start * step, rows)
    else:
        part = tensor[_index(tensor, place, start * step, stop * step)]
    front, behind = part.shape[: place.first], part.shape[place.first + 1 :]
    return part.view(*front, *[1] * place.joined, rows, *behind)


def _put(
    tensor: torch.Tensor, part: torch.Tensor, place: Sliced, units: int, start: int, stop: int
) -> None:
    """Write a slice where it belongs."""
    step = place.length(tensor.shape) // units
    flat, rows = _flat(tensor, place), part.flatten(place.first, place.axis)
    if flat is not None:
        flat.narrow(place.first, start * step, (stop - start) * step).copy_(rows)
    else:
        tensor[_index(tensor, place, start * step, stop * step)] = rows


def _flat(tensor: torch.Tensor, place: Sliced) -> torch.Tensor | None:
    """View a tensor with the axes that are cut as one; `None` if they lie apart."""
    shape = tensor.shape
    try:
        return tensor.view(*shape[: place.first], -1, *shape[place.axis + 1 :])
    except RuntimeError:
        return None


def _index(tensor: torch.Tensor, place: Sliced, start: int, stop: int) -> tuple[Any, ...]:
    rows = torch.arange(start, stop, device=tensor.device)
    at = torch.unravel_index(rows, tensor.shape[place.first : place.axis + 1])
    return (*[slice(None)] * place.first, *at)


class _Outputs:
    """What slices have made so far of the outputs of a body."""

    def __init__(self, sliced: SlicedBody, places: Mapping[str, Place]) -> None:
        self._sliced = sliced
        self._places = places
        self._made: dict[str, torch.Tensor] = {}
        self._divisors: dict[str, torch.Tensor] = {}

    def note(self, call: Call, made: Sequence[Any]) -> None:
        """Add up what sums of this call are divided by, which nothing else may read."""
        for name in call.results:
            place = self._places.get(name, WHOLE) if name is not None else WHOLE
            if isinstance(place, Summed) and place.over is not None and name is not None:
                known = self._divisors.get(name)
                addend = made[place.over]
                self._divisors[name] = addend if known is None else known + addend

    def take(self, env: Mapping[str, Any], start: int, stop: int) -> None:
        """Put what one slice made where it belongs."""
        for name in self._sliced.body.outputs:
            place, part = self._places[name], env[name]
            if isinstance(place, Sliced):
                whole = self._made.get(name)
                if whole is None:
                    facts = self._sliced.facts[name]
                    whole = self._made[name] = torch.empty_strided(
                        facts.shape, facts.stride, dtype=facts.dtype, device=facts.device
                    )
                _put(whole, part, place, self._sliced.units, start, stop)
            elif isinstance(place, Summed) and name in self._made:
                self._made[name] = self._made[name] + part
            else:
                self._made[name] = part

    def finished(self) -> list[torch.Tensor]:
        """Give the outputs once all slices have been taken."""
        return [
            self._made[name] / self._divisors[name] if name in self._divisors else self._made[name]
            for name in self._sliced.body.outputs
        ]
