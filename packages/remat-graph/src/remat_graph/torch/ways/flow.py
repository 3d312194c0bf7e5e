"""The ops and views of a program in an order in which they can run, and what leads to what.

What leads to what is kept as one set of bits for each step, which for thousands of ops takes some
megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remat_graph.torch.calls import Call
from remat_graph.torch.program import LOSS, Program

__all__ = ["Flow", "Step", "union"]


@dataclass(frozen=True, slots=True)
class Step:
    """An op or a view; those without a call, as the loss, are never inside."""

    call: Call | None
    reads: tuple[str, ...]
    results: tuple[str, ...]


class Flow:
    """The ops and views of a program in an order in which they can run, and what leads to what."""

    def __init__(self, program: Program) -> None:
        self.steps: dict[str, Step] = {}
        self.maker: dict[str, str] = {}
        self.readers: dict[str, list[str]] = {}
        for op in program.order:
            if op == LOSS:
                step = Step(None, program.held, tuple(program.tangents))
            elif op in program.writes:
                step = Step(None, (program.writes[op].variable,), ())
            else:
                step = _step_of(program.calls[op])
            self._add_views(program, step.reads)
            self._add(op, step)
        self._add_views(program, program.views)
        self.names = tuple(self.steps)
        self.position = {name: at for at, name in enumerate(self.names)}
        self.bit = bit = {name: 1 << at for name, at in self.position.items()}
        self.ops = 0  # all steps but views
        self.leaving: dict[str, list[str]] = {}  # which of these read a value
        for name, step in self.steps.items():
            if step.call is None or name in program.calls:
                self.ops |= bit[name]
                for value in {
                    program.storage[each] for each in step.reads if each in program.storage
                }:
                    self.leaving.setdefault(value, []).append(name)
        self.before: dict[str, int] = {}
        for name, step in self.steps.items():
            makers = {self.maker[read] for read in step.reads if read in self.maker}
            self.before[name] = bit[name] | union(self.before[maker] for maker in makers)
        self.behind: dict[str, int] = {}
        for name in reversed(self.names):
            results = self.steps[name].results
            readers = {reader for each in results for reader in self.readers.get(each, ())}
            self.behind[name] = bit[name] | union(self.behind[reader] for reader in readers)

    def _add_views(self, program: Program, names: Iterable[str]) -> None:
        for name in names:
            call = program.views.get(name)
            if call is not None and name not in self.maker:
                step = _step_of(call)
                self._add_views(program, step.reads)
                self._add(step.results[0], step)

    def _add(self, name: str, step: Step) -> None:
        self.steps[name] = step
        self.maker.update(dict.fromkeys(step.results, name))
        for read in step.reads:
            self.readers.setdefault(read, []).append(name)

    def first(self, bits: int) -> str:
        """Give the first step of a set."""
        return self.names[(bits & -bits).bit_length() - 1]

    def named(self, bits: int) -> list[str]:
        """List the steps of a set, in order."""
        names = []
        while bits:
            lowest = bits & -bits
            names.append(self.names[lowest.bit_length() - 1])
            bits ^= lowest
        return names


def _step_of(call: Call) -> Step:
    return Step(call, call.reads, tuple(name for name in call.results if name is not None))


def union(sets: Iterable[int]) -> int:
    """Unite sets of steps."""
    bits = 0
    for each in sets:
        bits |= each
    return bits
