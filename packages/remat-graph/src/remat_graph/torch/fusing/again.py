"""Values of the forward half that groups of the backward half give out once more.

The weight gradient of a product reads what came into it, most often the last that a group of the
forward half makes: a GELU, a norm. Some group of the backward half differentiates it, and has made
most of it again for that. If it gives it out, too, nobody stores it between the halves, and no
other op makes it again. This is what a minimum cut between the halves does where it recomputes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from remat_graph.torch.calls import Call
from remat_graph.torch.program import Program

__all__ = ["named_again", "reading_again", "values_given_again"]


def values_given_again(
    program: Program,
    parts: Sequence[Sequence[str]],
    inside: Collection[str],
    held: Collection[str],
) -> dict[int, list[str]]:
    """Find which variables each part of the backward half can give out, by its position.

    `parts` are ops that run as one, of either half. What is `inside` is given out by no part of the
    forward half, what is `held` stays until the end anyway.
    """
    return _Search(program, parts, inside, held).found()


class _Search:
    """One look at a program."""

    def __init__(
        self,
        program: Program,
        parts: Sequence[Sequence[str]],
        inside: Collection[str],
        held: Collection[str],
    ) -> None:
        self.program, self.parts, self.inside, self.held = program, parts, inside, held
        self.maker, self.readers = program.makers(), program.readers()
        self.part_of = {op: at for at, part in enumerate(parts) for op in part}
        self.place = {op: at for at, op in enumerate(program.order)}
        self.after: dict[int | str, set[int | str]] = {}  # parts, and ops that are in none
        for op in program.calls:
            for value in self._read(op):
                if value in self.maker:
                    self.after.setdefault(self._node(self.maker[value]), set()).add(self._node(op))

    def found(self) -> dict[int, list[str]]:
        given: dict[int, list[str]] = {}
        for part in self.parts:
            for op in part if part[0] not in self.program.backward_ops else ():
                for name in self.program.calls[op].results:
                    value = None if name is None else self.program.storage[name]
                    if name is None or value is None or value in self.held or value in self.inside:
                        continue
                    others = self._others_behind(value)
                    at = self._part_for(value, others) if others else None
                    if at is not None:
                        given.setdefault(at, []).append(name)
                        self.after.setdefault(at, set()).update(others)
        return given

    def _node(self, op: str) -> int | str:
        return self.part_of.get(op, op)

    def _read(self, op: str) -> set[str]:
        storage = self.program.storage
        return {storage[name] for name in self.program.calls[op].reads if name in storage}

    def _behind(self, value: str) -> set[str]:
        return self.readers.get(value, set()) & self.program.backward_ops

    def _others_behind(self, value: str) -> set[str]:
        """Name the ops of the backward half that read a value and are in no part."""
        return {op for op in self._behind(value) if op not in self.part_of}

    def _part_for(self, value: str, others: Collection[str]) -> int | None:
        """Find the part that has what a value is made of, and that none of `others` feeds.

        The one next to them in order: from there on the value is held.
        """
        sources, made = self._sources([self.maker[value]])
        in_parts = {self.part_of[op] for op in self._behind(value) if op in self.part_of}
        near = in_parts or {
            self.part_of[op]
            for source in sources | made
            for op in self._behind(source)
            if op in self.part_of
        }
        first = min(self.place[op] for op in others)
        apart = {at: abs(self.place[self.parts[at][-1]] - first) for at in sorted(near)}
        for at in sorted(near, key=apart.__getitem__) if len(in_parts) < 2 else ():
            there, _ = self._sources(self.parts[at])
            has_all = all(source in there or source not in self.maker for source in sources)
            if has_all and not any(self._reaches(op, at) for op in others):
                return at
        return None

    def _sources(self, ops: Collection[str]) -> tuple[set[str], set[str]]:
        """Find what ops read, and what is made for them again on the way."""
        sources, made = set[str](), set[str]()
        waiting = [value for op in ops for value in self._read(op)]
        while waiting:
            value = waiting.pop()
            if value not in self.inside:
                sources.add(value)
            elif value not in made:
                made.add(value)
                waiting += self._read(self.maker[value])
        return sources, made

    def _reaches(self, start: int | str, end: int) -> bool:
        seen, waiting = set[int | str](), [start]
        while waiting:
            node = waiting.pop()
            if node == end:
                return True
            if node not in seen:
                seen.add(node)
                waiting += self.after.get(node, ())
        return False


def named_again(name: str) -> str:
    """Name the variable that is given out once more."""
    return f"{name}__again"


def reading_again(
    program: Program, calls: Mapping[str, Call], names: Collection[str]
) -> tuple[Program, dict[str, Call]]:
    """Let the calls of the backward half read other variables in the place of these.

    Gives the program in which there are such variables, with their views, and the calls.
    """
    values = {program.storage[name] for name in names}
    new = {name: named_again(name) for name, value in program.storage.items() if value in values}

    def renamed(call: Call, results: tuple[str | None, ...]) -> Call:
        return call.of([new.get(name, name) for name in call.variables], results)

    views = dict(program.views)
    for name, call in program.views.items():
        if name in new:
            results = tuple(None if each is None else new[each] for each in call.results)
            views[new[name]] = renamed(call, results)
    storage = {new[name]: named_again(program.storage[name]) for name in new}
    facts = {new[name]: program.facts[name] for name in new}
    program = replace(
        program,
        views=views,
        storage={**program.storage, **storage},
        facts={**program.facts, **facts},
    )
    return program, {
        op: renamed(call, call.results)
        if op in program.backward_ops and not new.keys().isdisjoint(call.reads)
        else call
        for op, call in calls.items()
    }
