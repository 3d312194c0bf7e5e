"""Running a body slice by slice, so that what is inside exists one slice at a time.

Sums of 16 bits are added up in 32: in 16, what many slices add would be lost in what is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from remat_graph.torch.calls import Body, Call, TensorFacts, Variable, filled, is_view
from remat_graph.torch.operators import operator_of
from remat_graph.torch.slices.placement import WHOLE, Place, Placement, Sliced, Summed

__all__ = ["SlicedBody", "numbered"]

_SHORT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SlicedBody:
    """A body with a placement for each of its calls, and the units into which all is cut.

    `facts` are those of its variables, whole. `again` are variables that calls of the forward half
    make, once more, in a body of the backward half.
    """

    body: Body
    placements: tuple[Placement, ...]
    units: int
    facts: Mapping[str, TensorFacts]
    again: tuple[str, ...] = ()

    @cached_property
    def places(self) -> dict[str, Place]:
        """Where each variable stands; inputs that are read whole by some are whole."""
        places: dict[str, Place] = {}
        for call, placement in zip(self.body.calls, self.placements, strict=True):
            places.update(zip(call.variables, placement.inputs, strict=True))
            results = zip(call.results, placement.outputs, strict=True)
            places.update((name, place) for name, place in results if name is not None)
        return places

    def bounds(self, slices: int) -> list[int]:
        """Give where each of so many slices begins, in units, and where the last one ends."""
        return [self.units * at // slices for at in range(slices + 1)]

    @cached_property
    def read_as_traced(self) -> frozenset[str]:
        """The inputs that no call reads which runs again."""
        again = {
            name
            for call in self.body.calls
            if set(self.again).intersection(call.results)
            for name in call.reads
        }
        return frozenset(self.body.inputs) - again

    def giving(self, outputs: Collection[str]) -> SlicedBody:
        """Give no other outputs than these, and leave out what only others need."""
        read = {name for name in self.body.outputs if name in outputs}
        kept = []
        for call, placement in zip(
            reversed(self.body.calls), reversed(self.placements), strict=True
        ):
            if not read.isdisjoint(call.results):
                kept.append((call, placement))
                read.update(call.reads)
        body = Body(
            tuple(name for name in self.body.inputs if name in read),
            tuple(call for call, _ in reversed(kept)),
            tuple(name for name in self.body.outputs if name in outputs),
        )
        return replace(self, body=body, placements=tuple(way for _, way in reversed(kept)))

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        bounds: Sequence[int],
        after_slice: Callable[[], None] | None = None,
        *,
        into: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor]:
        """Give the outputs, made in slices of units from each of `bounds` to the next.

        They are made in the buffers `into`, one for each output, if these are given.
        """
        inputs = dict(zip(self.body.inputs, tensors, strict=True))
        outputs = _Outputs(self, len(bounds) - 1, into)
        for start, stop in pairwise(bounds):
            env: dict[str, Any] = {
                name: _part(tensor, self.places.get(name, WHOLE), self.units, start, stop)
                for name, tensor in inputs.items()
            }
            for step in self._steps(stop - start):
                step.run(env, outputs)
            outputs.take(env, start, stop)
            if after_slice is not None:
                after_slice()
        return outputs.finished()

    def _steps(self, count: int) -> tuple[_Step, ...]:
        """Give the calls of a slice of so many units: made once, for a step has many slices."""
        steps = self._steps_by_count.get(count)
        if steps is None:
            pairs = zip(self.body.calls, self.placements, self._last_read, strict=True)
            steps = self._steps_by_count[count] = tuple(
                _Step.of(call, placement, gone, count, self, over=at in self._in_place)
                for at, (call, placement, gone) in enumerate(pairs)
            )
        return steps

    @cached_property
    def _steps_by_count(self) -> dict[int, tuple[_Step, ...]]:
        return {}

    @cached_property
    def _last_read(self) -> tuple[tuple[str, ...], ...]:
        """The variables that each call is the last to touch, but for outputs."""
        last: dict[str, int] = {}
        for at, call in enumerate(self.body.calls):
            last.update(dict.fromkeys(call.reads, at))
            last.update((name, at) for name in call.results if name is not None)
        gone: list[list[str]] = [[] for _ in self.body.calls]
        for name, at in last.items():
            if name not in self.body.outputs or name in self.sums:
                gone[at].append(name)
        return tuple(map(tuple, gone))

    @cached_property
    def _in_place(self) -> frozenset[int]:
        """The calls that write over the tensor that they read first, which ends there."""
        root: dict[str, str] = {}
        last: dict[str, int] = {}
        for at, (call, gone) in enumerate(zip(self.body.calls, self._last_read, strict=True)):
            if is_view(call):
                source = root.get(call.reads[0])
                root.update((name, source) for name in call.results if name and source)
            else:
                root.update((name, name) for name in call.results if name is not None)
            last.update((root[name], at) for name in gone if name in root)
        last.update(
            (root[name], len(self.body.calls)) for name in self.body.outputs if name in root
        )
        found = set[int]()
        for at, call in enumerate(self.body.calls):
            read, result = call.args[0] if call.args else None, call.results[0]
            if operator_of(call.target).in_place is None or not isinstance(read, Variable):
                continue
            ends = root.get(read.name) == read.name and last[read.name] == at
            count = [root.get(name) for name in call.variables].count(read.name)
            if ends and count == 1 and result is not None and self._is_alike(read.name, result):
                found.add(at)
        return frozenset(found)

    def _is_alike(self, name: str, other: str) -> bool:
        """Whether two variables have the same form in every slice, and neither is added up."""
        places = self.places[name], self.places[other]
        is_sum = any(isinstance(place, Summed) for place in places)
        return places[0] == places[1] and not is_sum and self.facts[name] == self.facts[other]

    @cached_property
    def sums(self) -> frozenset[str]:
        """The outputs that are sums which no call of a slice reads."""
        read = {name for call in self.body.calls for name in call.reads}
        return frozenset(
            name
            for name in self.body.outputs
            if isinstance(self.places.get(name, WHOLE), Summed) and name not in read
        )

    def workspace_bytes(self, slices: int) -> int:
        """Predict what a run takes at most, beside what it is given and gives."""
        longest = max(stop - start for start, stop in pairwise(self.bounds(slices)))
        wider = [name for name in self.body.outputs if self._is_wider(name, slices)]
        wider_bytes = sum(
            math.prod(self.facts[n].shape) * self.facts[n].dtype.itemsize for n in wider
        )
        base: dict[str, str] = {}  # views hold what they are of
        held: dict[str, int] = {}
        users: dict[str, set[str]] = {}
        most = 0
        for at, (call, gone) in enumerate(zip(self.body.calls, self._last_read, strict=True)):
            views = is_view(call) or at in self._in_place
            for name in call.results:
                if name is None:
                    continue
                base[name] = base.get(call.reads[0], call.reads[0]) if views else name
                users.setdefault(base[name], set()).add(name)
                in_place = name in self.sums and operator_of(call.target).adds_to
                if not views and (not in_place or name in wider):
                    share = longest if isinstance(self.places[name], Sliced) else self.units
                    facts = self.facts[name]
                    held[name] = math.prod(facts.shape) * facts.dtype.itemsize * share // self.units
            beside = wider_bytes + self._workspace_of(call, longest)
            most = max(most, beside + sum(held.values()))
            for name in gone:
                root = base.get(name, name)
                users.get(root, set()).discard(name)
                if not users.get(root):
                    held.pop(root, None)
        return most

    def _workspace_of(self, call: Call, units: int) -> int:
        """Predict what a call takes of its own in a slice of so many units."""
        own = operator_of(call.target).workspace
        if own is None:
            return call.workspace_bytes
        first, facts = call.reads[0], self.facts[call.reads[0]]
        rows = -(-facts.shape[0] * units // self.units)
        return own({**self.facts, first: replace(facts, shape=(rows, *facts.shape[1:]))}, call)

    def _is_wider(self, name: str, slices: int) -> bool:
        """Whether it is added up in more bits than it has."""
        is_sum = isinstance(self.places.get(name, WHOLE), Summed)
        return is_sum and slices > 1 and self.facts[name].dtype in _SHORT


@dataclass(frozen=True, slots=True)
class _Step:
    """A call of a slice: what runs, what it is given and makes, and what goes after it.

    `add` adds what it makes to the sum that is its result; `share` multiplies what is `by_share`.
    """

    run_call: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[str | None, ...]
    sequence: bool
    add: Any
    share: float
    by_share: frozenset[int]
    gone: tuple[str, ...]

    @classmethod
    def of(
        cls,
        call: Call,
        placement: Placement,
        gone: tuple[str, ...],
        count: int,
        of: SlicedBody,
        *,
        over: bool,
    ) -> _Step:
        """Make it for a slice of so many units; it may write `over` what it reads first."""
        sliced = placement.call_for(call, count, of.units)
        operator = operator_of(call.target)
        short = call.results[0] is not None and of.facts[call.results[0]].dtype in _SHORT
        return cls(
            operator.in_place if over else operator.runs_as or call.target,
            sliced.args,
            sliced.kwargs,
            call.results,
            call.sequence,
            operator.adds_to if call.results[0] in of.sums and not short else None,
            count / of.units,
            placement.by_share,
            gone,
        )

    def run(self, env: dict[str, Any], outputs: _Outputs) -> None:
        """Run it on the variables of a slice."""
        args = [filled(item, env) for item in self.args]
        if self.add is not None and self.results[0] in outputs.totals:
            self.add(outputs.totals[self.results[0]], *args)
        else:
            kwargs = {key: filled(item, env) for key, item in self.kwargs.items()}
            output = self.run_call(*args, **kwargs)
            parts = list(output) if self.sequence else [output]
            for result in self.by_share:
                parts[result] = parts[result] * self.share
            for name, part in zip(self.results, parts, strict=True):
                if name is not None:
                    env[name] = part
            outputs.note(self.results, parts)
        for name in self.gone:
            env.pop(name, None)


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

    def __init__(self, sliced: SlicedBody, slices: int, into: Sequence[torch.Tensor] = ()) -> None:
        self._sliced = sliced
        self._slices = slices
        self._into = dict(zip(sliced.body.outputs, into, strict=True)) if into else {}
        self.totals: dict[str, torch.Tensor] = {}
        self._divisors: dict[str, torch.Tensor] = {}
        for name, buffer in self._into.items():
            place = sliced.places[name]
            if isinstance(place, Sliced):
                self.totals[name] = buffer
            elif isinstance(place, Summed) and not (slices > 1 and buffer.dtype in _SHORT):
                self.totals[name] = buffer.zero_()

    def note(self, results: Sequence[str | None], parts: Sequence[Any]) -> None:
        """Add up sums, and what they are divided by, which nothing else may read."""
        for name, part in zip(results, parts, strict=True):
            place = self._sliced.places[name] if name is not None else WHOLE
            if name is None or not isinstance(place, Summed):
                continue
            if place.over is not None:
                divisor = self._divisors.get(name, 0)
                self._divisors[name] = self._begun(parts[place.over]) + divisor
            if name in self.totals:
                self.totals[name].add_(part)
            elif name in self._sliced.body.outputs:
                self.totals[name] = self._begun(part)

    def _begun(self, part: torch.Tensor) -> torch.Tensor:
        """Give what the other slices add to."""
        return part.float() if self._slices > 1 and part.dtype in _SHORT else part

    def take(self, env: Mapping[str, Any], start: int, stop: int) -> None:
        """Put what one slice made where it belongs."""
        for name in self._sliced.body.outputs:
            place = self._sliced.places[name]
            if isinstance(place, Sliced):
                whole = self.totals.get(name)
                if whole is None:
                    facts = self._sliced.facts[name]
                    whole = self.totals[name] = torch.empty_strided(
                        facts.shape, facts.stride, dtype=facts.dtype, device=facts.device
                    )
                _put(whole, env[name], place, self._sliced.units, start, stop)
            elif not isinstance(place, Summed):
                self.totals[name] = env[name]

    def finished(self) -> list[torch.Tensor]:
        """Give the outputs once all slices have been taken."""
        whole = []
        for name in self._sliced.body.outputs:
            total = self.totals.pop(name)
            if name in self._divisors:
                total = total / self._divisors[name]
            buffer = self._into.get(name)
            if buffer is None:
                whole.append(total.to(self._sliced.facts[name].dtype))
            else:
                whole.append(buffer if buffer is total else buffer.copy_(total))
        return whole


def numbered(sliced: SlicedBody) -> SlicedBody:
    """Name the variables of a body in the order in which they appear: equal ones are equal then."""
    body, names = sliced.body.numbered()
    facts = {number: sliced.facts[name] for name, number in names.items()}
    again = tuple(names[name] for name in sliced.again if name in names)
    return replace(sliced, body=body, facts=facts, again=again)
