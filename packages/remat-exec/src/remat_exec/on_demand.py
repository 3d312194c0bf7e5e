"""Outputs that no step makes, made when they are read: by the forward's own ops, once more.

A recipe is a function for one output. It runs the ops that lead to it, as they are without a plan,
from the inputs of the forward, which it holds until it has run. Draws are repeated from the states
that the forward noted. Before it runs, these inputs are compared with what they were: by torch's
count of changes, and by checksums for changes that torch does not count. What has changed, as the
parameters have once an optimizer has stepped, cannot be used: then reading is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat_exec.checksums import changed, checksum
from remat_exec.codegen import compile_source
from remat_exec.deferred import DeferredTensor
from remat_exec.emit import Writer
from remat_exec.errors import OutputGone
from remat_exec.views import shortened
from remat_graph import Compute, Free, Step
from remat_graph.torch import Program, ops_making

__all__ = ["OnDemand", "Recipe"]

_weak: Any = StorageWeakRef


@dataclass(frozen=True)
class Recipe:
    """How to make one output of a program in which every output is made.

    `reads` are the inputs and constants that it is made of, `draws` the ops whose draws it repeats.
    Its code is written when it is first read.
    """

    position: int
    reads: tuple[str, ...]
    draws: frozenset[str]
    _program: Program = field(repr=False)
    _ops: tuple[str, ...] = field(repr=False)

    @classmethod
    def of(cls, program: Program, position: int) -> Recipe:
        """Give the recipe for what is handed over at a position."""
        ops = ops_making(program, position)
        calls = {op: program.calls[op].replay or program.calls[op] for op in ops}
        inputs = program.taken
        used = {program.storage.get(name, name) for call in calls.values() for name in call.reads}
        reads = tuple(name for name in inputs if program.storage.get(name, name) in used)
        draws = frozenset(op for op, call in calls.items() if call.random is not None)
        return cls(position, reads, draws, program, ops)

    def at(self, program: Program) -> Recipe:
        """Give the recipe for the same program of other sizes."""
        return replace(self, _program=program)

    @cached_property
    def _code(self) -> tuple[str, dict[str, Any], int]:
        """What makes it, as source, with what that names; and what it holds at most."""
        program = self._program
        output = program.handed[self.position]
        steps, peak = _steps(program, self._ops, program.storage[output])
        forward = [op for op in program.calls if op not in program.backward_ops]
        writer = Writer(
            program, set(self.draws), {}, shortened(program), (*forward, *program.writes)
        )
        writer.receive(self.reads)
        writer.run(steps)
        writer.make((output,))
        source = "\n".join(
            [
                "def make(inputs, states):",
                f"    [{', '.join(self.reads)}] = inputs",
                "    inputs.clear()",
                *(f"    {line}" for line in writer.lines),
                f"    return {output}",
                "",
            ]
        )
        return source, writer.bindings, peak

    @property
    def source(self) -> str:
        """The code that makes it."""
        return self._code[0]

    @property
    def peak_bytes(self) -> int:
        """What making it holds at most beside its inputs."""
        return self._code[2]

    def run(self, inputs: list[Any], states: dict[str, Any], device: torch.device) -> torch.Tensor:
        """Make the output; the list of inputs is emptied."""
        make: Callable[..., torch.Tensor] = compile_source(*self._code[:2])
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            return make(inputs, states)


class OnDemand:
    """The outputs of one forward that it does not make.

    It is made before the forward, which may write to its inputs, and fills `states`. `read` is
    called before an output is made; `made` gets its memory, by position.
    """

    def __init__(
        self,
        program: Program,
        recipes: Sequence[Recipe],
        bound: Sequence[Any],
        states: dict[str, Any],
        made: dict[int, StorageWeakRef],
        read: Callable[[Recipe], None],
    ) -> None:
        self._program, self._states, self._made, self._read = program, states, made, read
        names = program.taken
        known = dict(zip(names, bound, strict=True))
        self._inputs = {name: known[name] for recipe in recipes for name in recipe.reads}
        tensors = {n: one for n, one in self._inputs.items() if isinstance(one, torch.Tensor)}
        self._versions = {name: _version(tensor) for name, tensor in tensors.items()}
        self._sums = {name: checksum(tensor) for name, tensor in tensors.items()}

    def output(self, recipe: Recipe) -> DeferredTensor:
        """Give what stands for an output until it is read."""
        facts = self._program.facts[self._program.handed[recipe.position]]
        meta = torch.empty_strided(facts.shape, facts.stride, dtype=facts.dtype, device="meta")
        return DeferredTensor.like(meta, facts.device, lambda: self._make(recipe))

    def _make(self, recipe: Recipe) -> torch.Tensor:
        self._check(recipe)
        self._read(recipe)
        inputs = [self._inputs[name] for name in recipe.reads]
        output = recipe.run(inputs, self._states, self._program.device)
        self._made[recipe.position] = _weak(output.untyped_storage())
        return output

    def _check(self, recipe: Recipe) -> None:
        """See that what an output is made of is as it was.

        Raises:
            OutputGone: if it is not.
        """
        tensors = {name: self._inputs[name] for name in recipe.reads if name in self._versions}
        counted = [n for n, tensor in tensors.items() if _version(tensor) != self._versions[n]]
        if counted or changed({n: self._sums[n] for n in tensors}, tensors):
            raise OutputGone(
                "this output was not made in its step, and can no longer be: a parameter or an "
                "input that it is made of has changed since, as by an optimizer's step. Read it "
                "before, or name it in outputs= of remat.rematerialize, which has it made in "
                "every step. What a hook or an attribute keeps has no name there: return it from "
                "the model as well, or leave outputs= out"
            )


def _steps(program: Program, ops: Sequence[str], output: str) -> tuple[tuple[Step, ...], int]:
    """Run ops in turn, and free each value after its last reader; give the peak, too."""
    storage, steps = program.storage, list[Step]()
    calls = [program.calls[op].replay or program.calls[op] for op in ops]
    last: dict[str, int] = {}
    for at, call in enumerate(calls):
        made = [name for name in call.results if name is not None]
        last |= {storage[name]: at for name in (*call.reads, *made) if name in storage}
    held: set[str] = set()
    peak = 0
    for at, (op, call) in enumerate(zip(ops, calls, strict=True)):
        held |= {storage[name] for name in call.results if name is not None}
        peak = max(peak, sum(program.facts[value].storage_bytes for value in held))
        gone = sorted(value for value in held if last[value] == at and value != output)
        held -= set(gone)
        steps += [Compute(op), *map(Free, gone)]
    return tuple(steps), peak


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
