"""Which outputs are made in a step: those that are read, as the user says or as steps show.

What is not made must not be needed: no gradient comes to it, and it is not small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from remat.errors import RematError
from remat.report.words import mib
from remat_exec import Ability, Executor, abilities_of
from remat_graph import Numerics
from remat_graph.torch import Capture, CaptureError, Output, Program, Structure, flatten
from remat_solvers import BudgetTooSmall

__all__ = [
    "Outputs",
    "are_learned",
    "are_optional",
    "leaves_named",
    "not_named",
    "not_named_of_region",
    "note_what_loss_reads",
    "read_outputs",
    "with_named_outputs",
]

Outputs: TypeAlias = "str | int | Sequence[str | int]"
"""Fields, keys or positions of what a model returns."""

_BINDING = 0.1  # of what is needed: outputs that take less are not told of


def read_outputs(outputs: Outputs | None) -> tuple[str | int, ...] | None:
    """Read which outputs the user names.

    Raises:
        RematError: if they are no names or positions, or there are none.
    """
    if outputs is None:
        return None
    one = isinstance(outputs, str | int)
    several = isinstance(outputs, Sequence) and not isinstance(outputs, bytes)
    named = (outputs,) if one else tuple(outputs) if several else (None,)  # type: ignore[arg-type]
    if not all(isinstance(name, str | int) and not isinstance(name, bool) for name in named):
        raise RematError(
            f"outputs={outputs!r}; name what is read of what the model returns: a field, a key or "
            f"a position, or a list of these, such as outputs='loss' or outputs=[0, 2]"
        )
    if not named:
        raise RematError(
            f"outputs={outputs!r} names no output, so none gets a gradient; name the loss and what "
            f"else is read, or leave outputs= out"
        )
    return named  # type: ignore[return-value]


def are_optional(named: tuple[str | int, ...] | None, executor: Executor) -> bool:
    """Whether a plan may leave out outputs: where none is named, and they can be made when read."""
    return named is None and Ability.DEFERS_OUTPUTS in abilities_of(executor)


def are_learned(named: tuple[str | int, ...] | None, numerics: Numerics | None) -> bool:
    """Whether steps say which outputs are read: where what is not is of use for slices."""
    return named is None and numerics is not None and numerics.allows(Numerics.ROUNDING)


def not_named(named: Sequence[str | int], structure: Structure, program: Program) -> frozenset[int]:
    """Find the positions, among what a program returns, of outputs that are not named.

    Raises:
        RematError: if one is named that is not there.
    """
    leaves = leaves_named(named, structure)
    return _positions(program, (at in leaves for at in range(len(program.outputs))))


def not_named_of_region(
    named: Sequence[str | int], capture: Capture, rebuilt: Callable[[Any], Any]
) -> frozenset[int]:
    """Find the same of a region; `rebuilt` gives what the function returns, if that returns this.

    Raises:
        RematError: if one is named that is not there.
    """
    program = capture.program
    marks = [_mark(program, output) for output in program.outputs]
    returned = rebuilt(capture.output_structure.rebuild(iter(marks)))
    tensors, structure = flatten(returned)
    leaves = leaves_named(named, structure)
    read = {id(tensor) for at, tensor in enumerate(tensors) if at in leaves}
    return _positions(program, (id(mark) in read for mark in marks))


def with_named_outputs(captured: Capture, others: frozenset[int]) -> Capture:
    """Expect no gradient of the outputs at the `others` of positions, and make none that is large.

    Raises:
        CaptureError: if none that is named gets a gradient.
    """
    expected = frozenset(captured.program.tangents.values())
    if expected <= others:
        raise CaptureError(
            "none of the outputs that outputs= names gets a gradient; nothing to plan: name the "
            "loss, too"
        )
    differentiable = captured.missing | expected
    captured = captured.variant(captured.missing | (others & differentiable))
    return captured.with_deferred_outputs(others & captured.deferrable)


def _mark(program: Program, output: Output) -> torch.Tensor:
    """Make a tensor without memory that stands for an output."""
    facts = program.facts[output.variable]
    return torch.empty(facts.shape, dtype=facts.dtype, device="meta")


def _positions(program: Program, are_read: Iterable[bool]) -> frozenset[int]:
    """List the positions all of whose outputs are not read."""
    position = {name: at for at, name in enumerate(program.returned)}
    read = {
        position[output.base]
        for output, is_read in zip(program.outputs, are_read, strict=True)
        if is_read and output.base in position
    }
    return frozenset(position.values()) - read


def leaves_named(named: Sequence[str | int], structure: Structure) -> set[int]:
    """List the places, among all tensors of a structure, of those that are named."""
    if structure.kind == "tensor" and set(named) == {0}:
        return {0}
    keys = list(structure.keys)
    leaves: dict[Any, set[int]] = {}
    start = 0
    for key, child in zip(keys, structure.children, strict=True):
        leaves[key] = set(range(start, start + child.leaves))
        start += child.leaves
    found: set[int] = set()
    for name in named:
        key = name if name in leaves else None
        if key is None and isinstance(name, int) and -len(keys) <= name < len(keys):
            key = keys[name]
        if key is None:
            there = ", ".join(map(repr, keys)) or "one tensor, position 0"
            raise RematError(f"outputs= names {name!r}, and what the model returns has {there}")
        found |= leaves[key]
    return found


def note_what_loss_reads(error: BudgetTooSmall, offered: Capture) -> None:
    """Say beside a refusal that outputs which a loss outside reads are in the way."""
    program = offered.program
    size = sum(
        program.facts[program.returned[position]].storage_bytes
        for position in program.tangents.values()
    )
    if size >= _BINDING * error.smallest_bytes:
        error.add_note(
            f"A loss outside the model reads {mib(size)} of outputs, which are there whole, as "
            f"their gradients are. A module of the model and its criterion that returns the loss "
            f"alone has them planned, and with numerics='rounding' made in slices: see 'A loss "
            f"outside the model' in docs/budget.md."
        )
