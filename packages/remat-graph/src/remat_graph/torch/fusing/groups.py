"""Which ops are compiled together: pointwise ones, norms and sums between two products.

The depth of an op is how many ops that are not fused lie on the longest way to it. Connected ops of
one depth are a group: a way out of a group leads over an op that is not fused, so back into none,
and groups can run one after another. Between the halves nothing is fused; but what a group of the
forward half computes inside, and the backward half alone reads, is not given out: the groups of the
backward half make it again inside themselves, from what is there anyway. That is what a minimum cut
between the halves finds for such values, without asking what they are stored for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from remat_graph.torch.calls import Body, Call
from remat_graph.torch.fusing.again import values_given_again
from remat_graph.torch.operators import operator_of
from remat_graph.torch.program import LOSS, Program
from remat_graph.torch.recomputing import may_run_again
from remat_graph.torch.slices.elementwise import is_pointwise

__all__ = ["Group", "find_groups"]

aten = torch.ops.aten

_MOST_OPS = 64  # of a group: compilers take longer than in proportion
_SMALL = 16  # times smaller than what it is made of: stored rather than made again


@dataclass(frozen=True, slots=True)
class Group:
    """Ops of one half that run as one call, by `body`.

    `ops` are those in whose place it stands, `runs` those that it runs: without what nobody reads,
    and with what a group of the backward half makes again, of the forward half, whose variables
    are `again`. Variables of the body are called as in the program. Of its outputs, those that it
    gives out once more, of the forward half, are `given_again`.
    """

    ops: tuple[str, ...]
    runs: tuple[str, ...]
    body: Body
    again: frozenset[str]
    given_again: tuple[str, ...] = ()


def find_groups(
    program: Program, unfused: Collection[str] = (), *, give_again: bool = False
) -> tuple[Group, ...]:
    """Find the groups of a program without alternatives, of all ops but those `unfused`.

    A group without outputs is of ops whose results every reader makes again. With `give_again`,
    groups of the backward half give out what others read of the forward half, where they can.
    """
    return tuple(_Finder(program, unfused).groups(give_again=give_again))


class _Finder:
    """One look at a program."""

    def __init__(self, program: Program, unfused: Collection[str]) -> None:
        self.program = program
        storage = program.storage
        self.maker, self.readers = program.makers(), program.readers()
        outside = {*program.held, *program.gradients.values()}
        outside.update(write.variable for write in program.writes.values())
        self.outside = {storage[name] for name in outside}
        written = {storage[write.target] for write in program.writes.values()}
        self.fusible = {
            op: None
            for op in program.order
            if op in program.calls
            and op not in unfused
            and self._is_fusible(program.calls[op])
            and (op in program.backward_ops or written.isdisjoint(self._read(op)))
        }
        self.inside: set[str] = set()

    def groups(self, *, give_again: bool) -> Iterator[Group]:
        """Yield the groups, those of the forward half first."""
        backward = self.program.backward_ops
        parts = self._parts()
        for part in parts:
            if part[0] not in backward:
                self.inside |= self._made_again(part)
        given: dict[int, list[str]] = {}
        if give_again:
            given = values_given_again(self.program, parts, self.inside, self.outside)
        for at, part in enumerate(parts):
            group = self._group(part, tuple(given.get(at, ())))
            if group is not None:
                yield group

    def _is_fusible(self, call: Call) -> bool:
        """Whether the compiler makes loops of a call, and the call may run as often as need be."""
        facts = self.program.facts
        if call.random is not None or call.replay is not None or call.body is not None:
            return False
        if not (is_pointwise(call.target) or operator_of(call.target).fuses):
            return False
        names = (*call.reads, *(name for name in call.results if name is not None))
        if not may_run_again(call.target) or not all(name in facts for name in names):
            return False
        return all(
            facts[name].device == self.program.device
            and not facts[name].dtype.is_complex
            and 0 not in facts[name].shape
            for name in names
        )

    def _read(self, op: str) -> set[str]:
        storage = self.program.storage
        return {storage[name] for name in self.program.calls[op].reads if name in storage}

    def _written(self, op: str) -> list[str]:
        storage = self.program.storage
        return [storage[name] for name in self.program.calls[op].results if name is not None]

    def _parts(self) -> list[tuple[str, ...]]:
        """Part the fusible ops into connected ones of one depth, and of one half."""
        depth: dict[str, int] = {}
        parent: dict[str, str] = {}

        def root(op: str) -> str:
            while parent[op] != op:
                parent[op] = parent[parent[op]]
                op = parent[op]
            return op

        half = 0
        for op in self.program.order:
            if op == LOSS:
                half = len(self.program.order)  # deeper than all before
            if op not in self.program.calls:
                continue
            makers = {self.maker[value] for value in self._read(op) if value in self.maker}
            fused = [maker for maker in makers if maker in self.fusible]
            own = max((depth[maker] + (maker not in self.fusible) for maker in makers), default=0)
            depth[op] = max(own, half)
            if op in self.fusible:
                parent[op] = op
                for maker in fused:
                    if depth[maker] == depth[op]:
                        parent[root(op)] = root(maker)
        parts: dict[str, list[str]] = {}
        for op in self.fusible:
            parts.setdefault(root(op), []).append(op)
        return [
            tuple(part[start : start + _MOST_OPS])
            for part in self._sunk(list(parts.values()))
            for start in range(0, len(part), _MOST_OPS)
        ]

    def _sunk(self, parts: Sequence[Sequence[str]]) -> list[list[str]]:
        """Join each part with the one that alone reads of it, unless that keeps more until then."""
        part_of = {op: at for at, part in enumerate(parts) for op in part}
        joined = [list(part) for part in parts]
        for at in reversed(range(len(parts))):  # those that read of others come later
            readers = {
                part_of.get(reader, -1)
                for op in parts[at]
                for value in self._written(op)
                for reader in self.readers.get(value, ())
            }
            into = (readers - {at}).pop() if len(readers - {at}) == 1 else -1
            values = {value for op in parts[at] for value in self._written(op)}
            if into < 0 or not values.isdisjoint(self.outside):
                continue
            if self._is_backward(parts[at][0]) != self._is_backward(parts[into][0]):
                continue
            inputs = {value for op in parts[at] for value in self._read(op)} - values
            kept = {v for v in inputs if not self._is_read_by(v, joined[into])}
            given = {v for v in values if self._is_read_by(v, joined[into])}
            if self._bytes_of(kept & self.maker.keys()) <= self._bytes_of(given):
                joined[into] = joined[at] + joined[into]
                joined[at] = []
                part_of.update(dict.fromkeys(joined[into], into))
        order = {op: at for at, op in enumerate(self.program.order)}
        return [sorted(part, key=order.__getitem__) for part in joined if part]

    def _is_backward(self, op: str) -> bool:
        return op in self.program.backward_ops

    def _is_read_by(self, value: str, ops: Iterable[str]) -> bool:
        return not self.readers.get(value, set()).isdisjoint(ops)

    def _bytes_of(self, values: Iterable[str]) -> int:
        return sum(self.program.facts[value].storage_bytes for value in values)

    def _made_again(self, part: tuple[str, ...]) -> set[str]:
        """Find what a part of the forward half makes that the backward half makes again."""
        program, own = self.program, set(part)
        size = {v: program.facts[v].storage_bytes for op in part for v in self._written(op)}
        large = max(
            (program.facts[value].storage_bytes for op in part for value in self._read(op)),
            default=0,
        )
        inner = {
            value
            for value, size_bytes in size.items()
            if value not in self.outside
            and _SMALL * size_bytes >= large
            and all(self._stays_inside(reader, own) for reader in self.readers.get(value, ()))
        }
        again = {
            value
            for value in inner
            if not self.program.backward_ops.isdisjoint(self.readers.get(value, ()))
        }
        sources = self._sources(again, inner)
        extra = {value for value in sources if not self._is_there_behind(value)}
        extra_bytes = sum(program.facts[value].storage_bytes for value in extra)
        if not again or extra_bytes > sum(size[value] for value in again):
            return set()
        self.outside |= sources & size.keys()  # what is small is given out, for others to start at
        return inner

    def _stays_inside(self, reader: str, own: Collection[str]) -> bool:
        return reader in self.fusible and (reader in own or reader in self.program.backward_ops)

    def _sources(self, values: Iterable[str], inner: Collection[str]) -> set[str]:
        """Find what must be there to make values again, of which those that are `inner` are not."""
        sources, seen, waiting = set[str](), set[str](), list(values)
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            for source in self._read(self.maker[value]):
                if source in inner:
                    waiting.append(source)
                else:
                    sources.add(source)
        return sources

    def _is_there_behind(self, value: str) -> bool:
        """Whether the backward half reads a value anyway."""
        if value not in self.maker:
            return True
        return not self.program.backward_ops.isdisjoint(self.readers.get(value, ()))

    def _group(self, part: tuple[str, ...], given_again: tuple[str, ...]) -> Group | None:
        """Make the group of a part; `None` if compiling it would join nothing."""
        own, storage = set(part), self.program.storage
        outputs = [
            name
            for op in part
            for name in self.program.calls[op].results
            if name is not None and self._is_given(storage[name], own)
        ]
        outputs += given_again
        needed = self._needed(outputs, own)
        again = {n for op in needed - own for n in self.program.calls[op].results if n is not None}
        if outputs and len(needed) < 2:
            return None
        order = [op for op in self.program.calls if op in needed]
        body = self._body(order, outputs)
        return Group(part, tuple(order), body, frozenset(again), given_again)

    def _is_given(self, value: str, own: Collection[str]) -> bool:
        if value in self.outside:
            return True
        return value not in self.inside and not self.readers.get(value, set()) <= set(own)

    def _needed(self, outputs: Iterable[str], own: Collection[str]) -> set[str]:
        """Find the ops that make outputs, those of other groups which are run again among them."""
        needed, waiting = set[str](), [self.program.storage[name] for name in outputs]
        while waiting:
            op = self.maker[waiting.pop()]
            if op in needed:
                continue
            needed.add(op)
            waiting += [
                value
                for value in self._read(op)
                if value in self.inside or self.maker.get(value) in own
            ]
        return needed

    def _body(self, ops: Iterable[str], outputs: Iterable[str]) -> Body:
        """Write a body of calls, with the views that they read."""
        program = self.program
        calls, inputs, there = list[Call](), dict[str, None](), set[str]()
        inside = {name for op in ops for name in program.calls[op].results if name is not None}

        def require(name: str) -> None:
            if name in there or name in inputs:
                return
            view = program.views.get(name)
            if view is not None and (self._base(name) in inside or self._is_plain(name)):
                for source in view.reads:
                    require(source)
                calls.append(view)
                there.update(result for result in view.results if result is not None)
            else:
                inputs[name] = None

        for op in ops:
            call = program.calls[op]
            for name in call.reads:
                require(name)
            calls.append(call)
            there.update(result for result in call.results if result is not None)
        return Body(tuple(inputs), tuple(calls), tuple(outputs))

    def _base(self, name: str) -> str:
        while name in self.program.views:
            name = self.program.views[name].reads[0]
        return name

    def _is_plain(self, name: str) -> bool:
        """Whether a tensor is viewed step by step, of elements of its own type."""
        views, facts = self.program.views, self.program.facts
        while name in views:
            source = views[name].reads[0]
            if views[name].target is aten.as_strided.default:
                return False
            if source not in facts or facts[source].dtype != facts[name].dtype:
                return False
            name = source
        return True
