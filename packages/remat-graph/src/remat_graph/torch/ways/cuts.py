"""Where a program can be cut: stretches that run in slices, with what differentiates them.

A cut is looked for around the ops that hold most at once. From the largest value that the forward
makes there, a stretch is grown along an axis, and ended where least is read and given. In the
backward half it runs once more, slice by slice, together with what differentiates it: then what is
inside is never there whole. Equal layers have equal cuts, which are of one kind.

Guarantee: a cut computes the same up to the order of sums. Limits: it is grown greedily, along one
axis, within a window of ops; values that the user is handed stay whole. Complexity: a growth for
each axis of a value, for each kind and each of its layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remat_graph.torch.calls import Call
from remat_graph.torch.program import Program
from remat_graph.torch.recomputing import may_run_again
from remat_graph.torch.slices.placement import Sliced
from remat_graph.torch.ways.slice_by_slice import numbered
from remat_graph.torch.ways.stretches import Stretch, Stretches
from remat_graph.torch.ways.unit_tangent import UnitTangent, for_unit_tangent

__all__ = ["Cut", "cuts_of"]

_WINDOW = 32  # ops on each side of a value, among which the ends of a stretch are looked for
_WORTH = 0.1  # of what an op touches: smaller values are not cut around
_KINDS, _TRIES = 4, 16  # kinds that are found at most, and values that are looked at


_Axis = tuple[tuple[int, ...], int, int]  # of a tensor of this shape, with so many joined to it


@dataclass(frozen=True, slots=True)
class Cut:
    """A stretch of the forward half, and that of the backward half which makes it again.

    With `unit` nothing is made again: the forward makes gradients for a tangent of one.
    """

    forward: Stretch
    backward: Stretch
    unit: UnitTangent | None = None

    @property
    def units(self) -> int:
        """The most slices that it can run in."""
        return self.forward.body.units

    @property
    def ops(self) -> frozenset[str]:
        """The ops of the program whose place it takes."""
        return frozenset(self.forward.ops).union(self.backward.own)


def cuts_of(program: Program) -> tuple[tuple[Cut, ...], ...]:
    """Find the cuts of a program without alternatives, by kinds: first around what holds most.

    Behind these are those of them that can make their gradients in the forward, as other kinds.
    """
    finder = _Finder(program)
    kinds = tuple(finder.kinds())
    in_forward = (_in_forward(finder.program, cuts) for cuts in kinds)
    return (*kinds, *filter(None, in_forward))


class _Finder:
    """Looks for cuts; calls read what a view equals in place of the view."""

    def __init__(self, program: Program) -> None:
        self.program = program = _direct(program)
        self.stretches = Stretches(program)
        storage = program.storage
        self.size = {value: program.facts[value].storage_bytes for value in storage.values()}
        self.rank = {value: at for at, value in enumerate(self.size)}
        self.names: dict[str, list[str]] = {}
        for name, value in storage.items():
            self.names.setdefault(value, []).append(name)
        self.maker, self.readers = program.makers(), program.readers()
        self.forward = [op for op in program.calls if op not in program.backward_ops]
        self.position = {op: at for at, op in enumerate(self.forward)}
        written = {storage[write.target] for write in program.writes.values()}
        self.able = {
            op
            for op in self.forward
            if program.calls[op].random is None and written.isdisjoint(self._read(op))
        }
        self.again = {
            op
            for op in self.able
            if may_run_again(program.calls[op].target, program.calls[op].body)
        }
        self.backward_of: dict[str, list[str]] = {}
        for op in program.calls:
            if op in program.twins and op in program.backward_ops:
                self.backward_of.setdefault(program.twins[op], []).append(op)
        self.handed = {storage[name] for name in program.held}

    def _read(self, op: str) -> set[str]:
        storage = self.program.storage
        return {storage[name] for name in self.program.calls[op].reads if name in storage}

    def _written(self, op: str) -> set[str]:
        storage = self.program.storage
        return {storage[name] for name in self.program.calls[op].results if name is not None}

    def kinds(self) -> Iterator[tuple[Cut, ...]]:
        """Find a kind around each large value, unless it is inside one that was found before."""
        needs = {
            op: sum(self.size[value] for value in self._read(op) | self._written(op))
            for op in self.program.calls
        }
        seen: set[str] = set()
        count = tries = 0
        for op in sorted(needs, key=lambda op: -needs[op]):
            value = self._largest(op)
            if tries == _TRIES or count == _KINDS:
                return
            if value is None or self.maker[value] in seen or self.size[value] < _WORTH * needs[op]:
                continue
            seen.add(self.maker[value])
            tries += 1
            best = self._best(value, seen, self._axes(value))
            if best is None:
                seen.update(self.maker[other] for other in self._made_alike(value))
                continue
            cut, along = best
            cuts = [cut]
            count += 1
            seen |= cut.ops
            for other in self._made_alike(value):
                if self.maker[other] not in seen:
                    twin = self._best(other, seen, self._axes(other) & {along})
                    if twin is not None and _is_same(cut, twin[0]):
                        cuts.append(twin[0])
                        seen |= twin[0].ops
            yield tuple(cuts)

    def _largest(self, op: str) -> str | None:
        """Find the largest value that an op touches and the forward makes, first of those."""
        values = [
            value
            for value in self._read(op) | self._written(op)
            if self.maker.get(value) in self.again and value not in self.handed
        ]
        return min(values, key=lambda value: (-self.size[value], self.rank[value]), default=None)

    def _made_alike(self, value: str) -> Iterator[str]:
        """List the values that other calls of the same kind make as this one is made."""
        program = self.program
        own = self.maker[value]
        at = next(
            at for at, name in enumerate(program.calls[own].results)
            if name is not None and program.storage[name] == value
        )  # fmt: skip
        for op in self.forward:
            if op != own and op in self.again:
                name = program.calls[op].results[at : at + 1]
                if program.equivalence[op] == program.equivalence[own] and name[0] is not None:
                    yield program.storage[name[0]]

    def _axes(self, value: str) -> set[_Axis]:
        """List the axes of a value, as it is and as it is viewed, that can be cut.

        Each alone, and with all in front of it as one.
        """
        return {
            (self.program.facts[name].shape, axis, joined)
            for name in self.names[value]
            for axis, length in enumerate(self.program.facts[name].shape)
            for joined in {0, axis}
            if length > 1 and 0 not in self.program.facts[name].shape
        }

    def _best(
        self, value: str, taken: Collection[str], axes: Collection[_Axis]
    ) -> tuple[Cut, _Axis] | None:
        """Find the cut around a value that leaves least whole, in the most slices among equals.

        It is along one of `axes`. Ops that are `taken` stay outside.
        """
        free = self.able.difference(taken) | {self.maker[value]}
        cuts: list[tuple[int, int, _Axis, Cut]] = []
        for along in sorted(axes):
            shape, axis, joined = along
            name = next(n for n in self.names[value] if self.program.facts[n].shape == shape)
            cut = self._cut(value, name, Sliced(axis, joined), free)
            if cut is not None:
                cuts.append((self._left(cut), -cut.units, along, cut))
        if not cuts:
            return None
        *_, along, cut = min(cuts, key=lambda each: each[:3])
        return cut, along

    def _cut(self, value: str, name: str, place: Sliced, free: Collection[str]) -> Cut | None:
        own = self.maker[value]
        at = self.position[own]
        window = self.forward[max(0, at - _WINDOW) : at + _WINDOW + 1]
        whole = self.stretches.grow(name, place, ops=[op for op in window if op in free])
        if own not in whole.ops:
            return None
        forward = self.stretches.grow(name, place, ops=self._ended(whole.ops, own))
        if own not in forward.ops:
            return None
        backward = self._differentiated(forward)
        if backward is None:
            return None
        cut = Cut(self._giving(forward, backward), backward)
        return cut if value in self._inside(cut) else None

    def _ended(self, ops: Sequence[str], own: str) -> Sequence[str]:
        """Choose the ends of a stretch around an op, between which least is read and given.

        First one end, then the other; ends that only both together lead to are taken where half as
        little is, as where two losses read the same scores. Of the best the nearest are taken.
        """
        at = ops.index(own)
        across = self._across(ops, at)
        first, behind = at, 0
        for _ in range(2):
            behind = int(across[first].argmin())
            first = at - int(across[at::-1, behind].argmin())
        if 2 * across.min() <= across[first, behind]:
            length = np.add.outer(np.arange(at, -1, -1), np.arange(len(ops) - at))
            least = np.where(across == across.min(), length, len(ops))
            first, behind = (int(each) for each in np.unravel_index(least.argmin(), least.shape))
        return ops[first : at + behind + 1]

    def _across(self, ops: Sequence[str], at: int) -> NDArray[np.int64]:
        """Sum what ops read of others, and give to others than those that differentiate them.

        For each first op up to `at`, and for each last one from there on.
        """
        position = {op: where for where, op in enumerate(ops)}
        for op in ops:
            position.update(dict.fromkeys(self.backward_of.get(op, ()), position[op]))
        first, last = np.arange(at + 1)[:, None], np.arange(at, len(ops))
        across = np.zeros((at + 1, len(ops) - at), np.int64)
        for value in {each for op in ops for each in self._read(op) | self._written(op)}:
            maker, readers = self.maker.get(value), self.readers.get(value, set())
            makes = _is_between(first, last, position.get(maker or ""))
            gives = np.full_like(makes, value in self.handed)
            reads = np.zeros_like(makes)
            for reader in readers:
                inside = _is_between(first, last, position.get(reader))
                gives |= ~inside
                if reader in self.position:
                    reads |= inside
            read = reads & ~makes if maker is not None else np.zeros_like(makes)
            across += self.size[value] * (read | (makes & gives))
        return across

    def _backward_ops(self, forward: Stretch) -> list[str]:
        """List the ops that differentiate those of a stretch, what lies between, and their sums.

        What lies between may have another twin, or none, as what casts a gradient does; a sum is of
        gradients, and read by these ops alone.
        """
        own = {op for each in forward.ops for op in self.backward_of.get(each, ())}
        own |= self.stretches.between(own)
        for op in reversed(list(self.program.calls)):
            if op in self.program.backward_ops and op not in self.program.twins:
                readers = {
                    each for value in self._written(op) for each in self.readers.get(value, ())
                }
                if readers and readers <= own:
                    own.add(op)
        return [op for op in self.program.calls if op in own]

    def _differentiated(self, forward: Stretch) -> Stretch | None:
        """Grow the stretch of what differentiates another, which runs again as far as need be."""
        own, again = self._backward_ops(forward), self.again.intersection(forward.ops)
        reads = {name for op in own for name in self.program.calls[op].reads}
        best: Stretch | None = None
        for name, place in forward.places.items():
            if isinstance(place, Sliced) and name in reads:
                grown = self.stretches.grow(
                    name, place, units=forward.body.units, ops=own, again=again
                )
                if grown.own and (best is None or len(grown.own) > len(best.own)):
                    best = grown
                if len(grown.own) == len(own):
                    break
        return best

    def _giving(self, forward: Stretch, backward: Stretch) -> Stretch:
        """Let a stretch give what runs once in it, where the other one reads that."""
        storage, body = self.program.storage, forward.body.body
        read = {storage[name] for name in backward.body.body.inputs if name in storage}
        made = (name for op in forward.own for name in self.program.calls[op].results)
        given = [name for name in made if name is not None and storage[name] in read]
        outputs = tuple(dict.fromkeys((*body.outputs, *given)))
        return replace(forward, body=replace(forward.body, body=replace(body, outputs=outputs)))

    def _inside(self, cut: Cut) -> set[str]:
        """Name the values that are no longer there whole."""
        storage = self.program.storage
        ends = {storage[name] for name in cut.backward.body.body.inputs if name in storage}
        inside = {value for op in cut.ops for value in self._written(op)}
        return {
            value
            for value in inside - ends - self.handed
            if self.readers.get(value, set()) <= cut.ops
            and value not in {storage[name] for name in self.program.gradients.values()}
        }

    def _left(self, cut: Cut) -> int:
        """Sum what is still there whole of what both stretches touch."""
        touched = {value for op in cut.ops for value in self._read(op) | self._written(op)}
        whole = touched - self._inside(cut) - self.program.resident
        return sum(self.size[value] for value in whole)


def _in_forward(program: Program, cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """Let all cuts of a kind make their gradients in the forward; none, if one of them cannot."""
    units = [for_unit_tangent(program, cut.forward.body, cut.backward.body) for cut in cuts]
    pairs = zip(cuts, units, strict=True)
    return () if None in units else tuple(replace(cut, unit=unit) for cut, unit in pairs)


def _is_between(
    first: NDArray[np.int64], last: NDArray[np.int64], position: int | None
) -> NDArray[np.bool_]:
    """Whether a position is within each of these bounds; none is not."""
    if position is None:
        return np.zeros(np.broadcast_shapes(first.shape, last.shape), bool)
    return (first <= position) & (position <= last)


def _is_same(one: Cut, other: Cut) -> bool:
    pairs = (one.forward, other.forward), (one.backward, other.backward)
    return all(numbered(a.body) == numbered(b.body) for a, b in pairs)


def _direct(program: Program) -> Program:
    """Let calls read what a view equals in place of the view."""
    first: dict[Any, str] = {}
    equal = {
        name: first.setdefault((value, program.facts[name]), name)
        for name, value in program.storage.items()
    }

    def direct(call: Call) -> Call:
        names = [equal.get(name, name) for name in call.variables]
        return call if names == call.variables else call.of(names, call.results)

    return replace(
        program,
        calls={op: direct(call) for op, call in program.calls.items()},
        views={name: direct(call) for name, call in program.views.items()},
    )
