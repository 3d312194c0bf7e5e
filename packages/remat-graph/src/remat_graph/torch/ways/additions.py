"""What rules for alternatives ask of a program, and what they add to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from remat_graph.graph import Numerics
from remat_graph.torch.operators import operator_of
from remat_graph.torch.program import Alternative, Call, Program, TensorFacts, Variable
from remat_graph.torch.recomputing import may_run_again

__all__ = ["Addition", "ProgramReader", "is_dense", "vector"]

aten = torch.ops.aten

_WORTH = 1e-3  # of all that the backward reads of the forward


@dataclass(frozen=True, slots=True)
class Addition:
    """One call to add behind the op `after`: an alternative, or what packs if that is of nothing.

    `result` describes its result if that is new; `views` are variables that it needs besides.
    """

    name: str
    call: Call
    after: str
    alternative: Alternative
    result: TensorFacts | None = None
    views: tuple[tuple[str, Call, TensorFacts], ...] = ()


class ProgramReader:
    """What the rules ask of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.facts = program.facts
        self._maker: dict[str, str] = {}
        self._readers: dict[str, list[str]] = {}
        for op, call in program.calls.items():
            for result in call.results:
                if result is not None:
                    self._maker[program.storage[result]] = op
            sized = call.args[1].name if operator_of(call.target).sizes_alone else None
            for name in call.reads:
                if name in program.storage and name != sized:
                    self._readers.setdefault(program.storage[name], []).append(op)
        self._held = {program.storage[name] for name in program.held}
        kept = sum(
            program.facts[value].storage_bytes
            for value, maker in self._maker.items()
            if maker not in program.backward_ops and self.backward_readers(value)
        )
        self._least = max(1.0, _WORTH * kept)

    def maker(self, name: str) -> str:
        """Name the op that makes the buffer of a variable."""
        return self._maker[self.program.storage[name]]

    def readers(self, name: str) -> list[str]:
        """List the ops that read the buffer of a variable, and not its sizes alone."""
        return self._readers.get(self.program.storage[name], [])

    def backward_readers(self, name: str) -> set[str]:
        """Find those of them in the backward half."""
        return set(self.readers(name)) & self.program.backward_ops

    def is_kept(self, item: Any) -> bool:
        """Whether this is a variable of the forward half, dense, and large enough to pay."""
        if not isinstance(item, Variable) or item.name not in self.program.storage:
            return False
        maker = self._maker.get(self.program.storage[item.name])
        if maker is None or maker in self.program.backward_ops:
            return False
        facts = self.facts[item.name]
        return is_dense(facts) and facts.storage_bytes >= self._least

    def may_be_made_again(self, name: str) -> bool:
        """Whether a result may be made twice, and something in the backward reads it."""
        value = self.program.storage[name]
        call = self.program.calls[self.maker(name)]
        return (
            value not in self._held
            and bool(self.backward_readers(name))
            and may_run_again(call.target, call.body)
        )

    def result_of(self, target: Any, name: str, *rest: Any) -> str | None:
        """Find what an operator made of a variable, with these arguments, in the same layout."""
        for op in self.readers(name):
            call = self.program.calls[op]
            result = call.results[0]
            if call.target is target and result is not None and _with_defaults(call)[1:] == rest:
                return result if self.facts[result] == self.facts[name] else None
        return None

    def packing(self, call: Call, source: str, packed: TensorFacts) -> Addition:
        """Add what packs a variable, behind its maker; it is called like what it makes."""
        name = str(call.results[0])
        return Addition(name, call, self.maker(source), Alternative(None, Numerics.BITWISE), packed)

    def stand_in(
        self, op: str, grad: Variable, x: Variable
    ) -> tuple[str, Call, TensorFacts] | None:
        """Make a view of a gradient that has the sizes of `x`, and its layout if there is room."""
        like, room = self.facts[x.name], self.facts[grad.name]
        if like.dtype != room.dtype or not is_dense(room) or not room.storage_bytes:
            return None
        stride = like.stride
        if not is_dense(like) or like.storage_bytes > room.storage_bytes:
            if like.stride != _contiguous(like.shape):
                return None
            stride = (0,) * len(like.shape)  # what operators take for contiguous
        name = f"{op}__sizes"
        args = (grad, list(like.shape), list(stride))
        call = Call(aten.as_strided.default, args, {}, (name,), sequence=False)
        return name, call, replace(room, shape=like.shape, stride=stride)


def is_dense(facts: TensorFacts) -> bool:
    """Whether the elements of a variable fill its buffer, each one once."""
    expected = 1
    for stride, size in sorted(zip(facts.stride, facts.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return facts.offset == 0 and expected * facts.dtype.itemsize == facts.storage_bytes


def vector(count: int, dtype: torch.dtype, device: torch.device) -> TensorFacts:
    """Describe a contiguous vector with a buffer of its own."""
    return TensorFacts((count,), (1,), 0, dtype, device, count * dtype.itemsize)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


def _with_defaults(call: Call) -> tuple[Any, ...]:
    arguments = call.target._schema.arguments[len(call.args) :]
    return (*call.args, *(argument.default_value for argument in arguments))
