"""Cross entropies as one call for each half, which makes no log-probabilities of all classes.

A program has a log-softmax and a loss of targets in the forward half, and the backward of each in
the other; scores in 16 bits are made longer before. What is in the place of these four, or six,
rounds otherwise, takes a fifth of the time, and needs of the scores' size only the gradient, which
can be written over them. Source: Liger-Kernel (Hsu and others 2024), section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from remat_graph.torch.calls import Call, TensorFacts, Variable
from remat_graph.torch.kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_backward,
    rows_at_once,
    workspace_bytes,
)
from remat_graph.torch.program import Program
from remat_graph.torch.regrouping import values_read, with_groups

__all__ = ["with_cross_entropies"]

aten = torch.ops.aten

_CLASSES = 4096  # below, log-probabilities stay in the cache by themselves
_LONG = (torch.float32, torch.float64)
_SHORT = (torch.float16, torch.bfloat16)


def with_cross_entropies(program: Program) -> Program:
    """Write a program without alternatives anew with these calls, where there are large ones."""
    targets = (call.target for call in program.calls.values())
    if aten._log_softmax.default in targets:
        for loss in _Finder(program).losses():
            program = loss.in_place_of(program)
    return program


@dataclass(frozen=True, slots=True)
class _Loss:
    """Ops that a cross entropy takes the place of, with its variables.

    `scores` and `gradient` are of one value each, whose variable has another shape where a call
    that views it is given.
    """

    forward: tuple[str, ...]
    backward: tuple[str, ...]
    scores: str
    gradient: str
    dtype: torch.dtype

    def in_place_of(self, program: Program) -> Program:
        """Write a program anew."""
        of_targets = program.calls[self.forward[-1]]
        of_loss = next(
            call
            for call in map(program.calls.__getitem__, self.backward)
            if call.target is aten.nll_loss_backward.default
        )
        shape = program.facts[of_targets.args[0].name].shape
        program, scores = _in_rows(program, self.scores, shape)
        program, gradient = _result_in_rows(program, self.gradient, shape)
        own = self.dtype, rows_at_once(program.facts[scores], self.dtype)
        bytes_beside = workspace_bytes(program.facts[scores], *own)
        forward, backward = (f"{ops[-1]}__of_scores" for ops in (self.forward, self.backward))
        calls = {
            op: call
            for op, call in program.calls.items()
            if op not in self.forward and op not in self.backward
        }
        calls[forward] = Call(
            cross_entropy, (Variable(scores), *of_targets.args[1:5], *own), {},
            of_targets.results,
            sequence=True, workspace_bytes=bytes_beside,
        )  # fmt: skip
        grad, _, *settings, total = of_loss.args
        calls[backward] = Call(
            cross_entropy_backward, (Variable(scores), grad, *settings, total, *own), {},
            (gradient,), sequence=False, workspace_bytes=bytes_beside,
        )  # fmt: skip
        groups = dict.fromkeys(self.forward, forward) | dict.fromkeys(self.backward, backward)
        return with_groups(program, calls, groups, {backward: forward})


class _Finder:
    """Looks for losses in a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.makers, self.readers = program.makers(), program.readers()
        self.kept = values_read(program, {})

    def losses(self) -> list[_Loss]:
        """List those whose log-probabilities nothing else reads."""
        found = (self._loss(op) for op in self.program.calls)
        return [loss for loss in found if loss is not None]

    def _loss(self, op: str) -> _Loss | None:
        call, facts = self.program.calls[op], self.program.facts
        if call.target is not aten._log_softmax.default:
            return None
        scores, axis, _ = call.args
        (logs,) = call.results
        of_logs = None if logs is None else facts[logs]
        if (
            logs is None
            or of_logs is None
            or len(of_logs.shape) != 2
            or axis not in (1, -1)
            or of_logs.shape[1] < _CLASSES
            or of_logs.dtype not in _LONG
        ):
            return None
        of_targets = self._reader(logs, aten.nll_loss_forward.default, 3)
        of_loss = self._reader(logs, aten.nll_loss_backward.default, 3)
        of_softmax = self._reader(logs, aten._log_softmax_backward_data.default, 3)
        if of_targets is None or of_loss is None or of_softmax is None:
            return None
        if facts[self.program.calls[of_targets].args[1].name].dtype is not torch.int64:
            return None
        between, gradient = self._result(of_loss), self._result(of_softmax)
        if self._reader(between, aten._log_softmax_backward_data.default, 1) != of_softmax:
            return None
        forward: tuple[str, ...] = op, of_targets
        backward: tuple[str, ...] = of_loss, of_softmax
        longer, shorter = self._longer(scores.name), self._shorter(gradient)
        if longer is not None and shorter is not None:
            source, result = self._read(longer), self._result(shorter)
            if facts[source].dtype == facts[result].dtype:
                forward, backward = (longer, *forward), (*backward, shorter)
                scores, gradient = Variable(source), result
        if (
            facts[scores.name].dtype != facts[gradient].dtype
            or not _is_in_rows(facts[scores.name])
            or not _is_in_rows(facts[gradient])
        ):
            return None
        return _Loss(forward, backward, scores.name, gradient, of_logs.dtype)

    def _reader(self, name: str, target: object, count: int) -> str | None:
        """Name the one op of a kind that reads a variable, if so many ops read it, all as it is."""
        program = self.program
        value, facts = program.storage[name], program.facts[name]
        readers = self.readers.get(value, set())
        read = {
            each
            for op in readers
            for each in program.calls[op].reads
            if program.storage.get(each) == value
        }
        if value in self.kept or len(readers) != count:
            return None
        if any(program.facts[each] != facts for each in read):
            return None
        of_kind = [op for op in readers if program.calls[op].target is target]
        return of_kind[0] if len(of_kind) == 1 else None

    def _longer(self, scores: str) -> str | None:
        """Name the op that makes scores longer, for the log-softmax alone."""
        value = self.program.storage[scores]
        maker = self.makers.get(value)
        if maker is None or not self._is_alone(value) or not self._is_cast(maker):
            return None
        return maker if self.program.facts[self._read(maker)].dtype in _SHORT else None

    def _shorter(self, gradient: str) -> str | None:
        """Name the op that makes their gradient shorter again, which alone reads it."""
        value = self.program.storage[gradient]
        if not self._is_alone(value):
            return None
        (reader,) = self.readers[value]
        return reader if self._is_cast(reader) else None

    def _is_alone(self, value: str) -> bool:
        return value not in self.kept and len(self.readers.get(value, ())) == 1

    def _is_cast(self, op: str) -> bool:
        call = self.program.calls[op]
        own = {"dtype", "layout", "device"}
        if call.target is not aten._to_copy.default or not call.kwargs.keys() <= own:
            return False
        facts = self.program.facts
        return facts[self._read(op)].device == facts[self._result(op)].device

    def _read(self, op: str) -> str:
        return self.program.calls[op].reads[0]

    def _result(self, op: str) -> str:
        (name,) = self.program.calls[op].results
        assert name is not None
        return name


def _is_in_rows(facts: TensorFacts) -> bool:
    """Whether a tensor has all elements of its memory, row by row."""
    dense = tuple(math.prod(facts.shape[at + 1 :]) for at in range(len(facts.shape)))
    return facts.is_whole and facts.stride == dense


def _rows(facts: TensorFacts, shape: tuple[int, ...]) -> TensorFacts:
    return replace(facts, shape=shape, stride=(shape[1], 1))


def _in_rows(program: Program, name: str, shape: tuple[int, ...]) -> tuple[Program, str]:
    """Give a variable of this shape that has the value of another: what an op made, if it can be.

    Where there is none, a view is added.
    """
    value, wanted = program.storage[name], _rows(program.facts[name], shape)
    same = [
        each
        for each, own in program.storage.items()
        if own == value and program.facts[each] == wanted
    ]
    if same:
        return program, min(same, key=lambda each: each in program.views)
    new = f"{name}__rows"
    call = Call(aten.view.default, (Variable(name), list(shape)), {}, (new,), sequence=False)
    return replace(
        program,
        views={**program.views, new: call},
        storage={**program.storage, new: value},
        facts={**program.facts, new: wanted},
    ), new


def _result_in_rows(program: Program, name: str, shape: tuple[int, ...]) -> tuple[Program, str]:
    """Give the variable of this shape that an op is to make, of which another is then a view."""
    facts = program.facts[name]
    if facts.shape == shape:
        return program, name
    new, value = f"{name}__rows", program.storage[name]
    call = Call(aten.view.default, (Variable(new), list(facts.shape)), {}, (name,), sequence=False)
    storage = {each: new if own == value else own for each, own in program.storage.items()}
    return replace(
        program,
        views={name: call, **program.views},
        storage={new: new, **storage},  # first what others are views of
        facts={**program.facts, new: _rows(facts, shape)},
    ), new
