"""Between a program and autograd: the user's outputs, and the gradients that come back for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from remat_exec.errors import BackwardError
from remat_graph.torch import Output, Program, TensorFacts, Variable

__all__ = ["HandOut", "Outputs", "tangents_of"]

aten = torch.ops.aten

HandOut = Callable[[int, torch.Tensor], torch.Tensor]
"""Gets the position of an output and the tensor; gives what the user gets, connected to it."""


class Outputs:
    """Makes the user's output tensors, each once, of what autograd was handed and of inputs.

    `handed` are in the order of `program.handed`; what stands there may be put in place until an
    output is made of it. `inputs` are tensors by variable. `hand_out` gets the position of each
    output and the tensor, and makes what stands in its place.
    """

    def __init__(
        self,
        program: Program,
        handed: Sequence[torch.Tensor],
        inputs: dict[str, torch.Tensor],
        hand_out: HandOut | None = None,
    ) -> None:
        self._program, self._hand_out = program, hand_out
        self._whole = dict(zip(program.returned, program.handed, strict=True))
        self._tensors = {**inputs, **dict(zip(program.handed, handed, strict=True))}
        self._outputs: dict[int, torch.Tensor] = {}
        self._gates: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._first = {
            (output.variable, output.requires_grad): at
            for at, output in reversed([*enumerate(program.outputs)])
        }

    def replace(self, position: int, tensor: torch.Tensor) -> None:
        """Put a tensor in the place of what was handed."""
        self._tensors[self._program.handed[position]] = tensor

    def view_through(self, at: int, gate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Make an output as a view of what a function makes of the tensor that it is a view of."""
        self._gates[at] = gate

    def __getitem__(self, at: int) -> torch.Tensor:
        """Give an output."""
        output = self._program.outputs[at]
        first = self._first[output.variable, output.requires_grad]
        if first != at:  # returned twice
            return self[first]
        if at not in self._outputs:
            tensor = self._made(output, self._gates.get(at))
            self._outputs[at] = self._hand_out(at, tensor) if self._hand_out else tensor
        return self._outputs[at]

    def all(self) -> list[torch.Tensor]:
        """Give all outputs, in order."""
        return [self[at] for at in range(len(self._program.outputs))]

    def _made(
        self, output: Output, gate: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> torch.Tensor:
        above = None if output.requires_grad else self._above(output.variable)
        if above is not None:
            base, at = above
            return _view(self._program, output.variable, base, self[at])
        tensor = self._tensors.get(output.variable)
        if output.kind == "input":
            tensor = self._tensors[output.base]
        if tensor is None:
            base, whole = self._viewed(output)
            whole = gate(whole) if gate is not None else whole
            tensor = _view(self._program, output.variable, base, whole, output.layout)
        if tensor.requires_grad and not output.requires_grad:
            tensor = tensor.detach()
        return tensor

    def _above(self, name: str) -> tuple[str, int] | None:
        """Find the output without a gradient that another such is a view of: variable, position.

        Who writes what has a gradient to the one changes the other, as autograd sees it.
        """
        while name in self._program.views:
            name = self._program.views[name].reads[0]
            if (name, False) in self._first:
                return name, self._first[name, False]
        return None

    def _viewed(self, output: Output) -> tuple[str, torch.Tensor]:
        """Find what an output is a view of, by variable: another output, if it is one of that.

        So it adds its part to the gradient of that other one, as in eager.
        """
        program, name = self._program, output.variable
        base = self._whole.get(output.base, output.base)
        viewed = {
            program.facts[program.outputs[at].variable]: at
            for at in output.computed_from
            if program.outputs[at].base == output.base
        }
        while viewed and name in program.views and name != base:
            name = program.views[name].reads[0]
            at = viewed.get(program.facts[name])
            if at is not None:
                return name, self[at]
        return base, self._tensors[base]


def tangents_of(
    program: Program, read: Mapping[str, int], gradients: list[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Turn the gradients of what autograd was handed into those that a backward reads.

    `read` are those of `program.tangents` that came.
    """
    tangents = []
    for name, position in read.items():
        gradient, whole = gradients[position], program.handed[position]
        gradients[position] = None
        if whole != program.returned[position]:
            gradient = _as_planned(gradient, program.facts[whole])
            gradient = _view(program, program.returned[position], whole, gradient)
        tangents.append(_as_planned(gradient, program.facts[name]))
    return tangents


def _view(
    program: Program,
    variable: str,
    base: str,
    tensor: torch.Tensor,
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None = None,
) -> torch.Tensor:
    """Make a view outside the differentiated program, so that autograd knows it as one."""
    chain = program.view_chain(variable, base)
    if chain is None and layout is not None:
        shape, stride, start = layout
        return tensor.as_strided(shape, stride, tensor.storage_offset() + start)
    bases: tuple[str, ...] = (base,)
    if chain is None:
        bases += program.written_into(base)
        chain = program.view_chain(variable, *bases)
    if chain is None:
        facts = program.facts[variable]
        return tensor.as_strided(facts.shape, facts.stride, facts.offset)
    tensors: dict[str, Any] = dict.fromkeys(bases, tensor)
    for call in chain:
        args, kwargs = pytree.tree_map(
            lambda item: tensors[item.name] if isinstance(item, Variable) else item,
            (call.args, dict(call.kwargs)),
            is_leaf=lambda item: isinstance(item, Variable),
        )
        # What was detached from the base and has a gradient got it from being changed in place; the
        # base has it, too.
        run = aten.alias.default if call.target is aten.detach.default else call.target
        views = run(*args, **kwargs)
        parts = list(views) if call.sequence else [views]
        tensors.update({n: p for n, p in zip(call.results, parts, strict=True) if n is not None})
    result: torch.Tensor = tensors[variable]
    return result


def _as_planned(gradient: torch.Tensor | None, facts: TensorFacts) -> torch.Tensor:
    """Bring a gradient into the layout that the graph was captured with."""
    if gradient is None:
        raise BackwardError("a gradient that the plan reads is missing; please report it")
    if tuple(gradient.stride()) == facts.stride or gradient.numel() == 0:
        return gradient
    planned = torch.empty_strided(
        facts.shape, facts.stride, dtype=facts.dtype, device=gradient.device
    )
    return planned.copy_(gradient)
