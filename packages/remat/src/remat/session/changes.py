"""Inputs and outputs of regions that code between the regions changes in place.

Eager keeps some of them for the backward, and raises if they were changed. Others it does not keep,
and would not notice; but a region may have to compute something again from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from remat.plans.reads import read_by_backward
from remat_exec import checksum
from remat_graph.torch import Capture
from remat_solvers import store_all

__all__ = ["Changes", "Exposed", "Watched"]

Watched = tuple[int, torch.Tensor, tuple[int, Any]]
"""The position of an input, the input, and its version and checksum when it was copied; or `~` that
of an output and its copy."""


@dataclass(frozen=True, slots=True)
class Exposed:
    """The inputs and outputs that are read where eager would not keep them, by position.

    They are the same for all sizes of a trace.
    """

    inputs: frozenset[int]
    outputs: frozenset[int]

    @classmethod
    def of(cls, capture: Capture) -> Exposed:
        """Find those of a region."""
        return cls(_exposed_inputs(capture), _exposed_outputs(capture))


class Changes:
    """What later code changes of the inputs and outputs of a region, and the copies it is handed.

    `seen` says of inputs, and of outputs (`~position`), that they were changed in place or not, and
    `None` of one whose calls had no backward so far; it is shared by the regions of one place in
    the code, of whatever sizes. What eager would not keep, and may have to be there again, is
    copied in the first calls, which are watched, and from then on if it was changed.
    """

    def __init__(self, exposed: Exposed, seen: dict[int, bool | None]) -> None:
        self._seen = seen
        self._inputs, self._outputs = exposed.inputs, exposed.outputs

    def protect_inputs(self, tensors: list[torch.Tensor]) -> list[Watched]:
        """Put copies in the place of inputs; give those that are to be watched."""
        watched = []
        for position in self._inputs:
            tensor = tensors[position]
            changed = self._seen.get(position)
            if isinstance(tensor, torch.nn.Parameter) or changed is False:
                continue
            tensors[position] = _copied(tensor)
            if changed is None:
                watched.append((position, tensor, _state(tensor)))
        return watched

    def protect_output(
        self, position: int, output: torch.Tensor
    ) -> tuple[torch.Tensor, Watched | None]:
        """Give an output, or a copy of it; and what is to be watched, if anything is."""
        changed = self._seen.get(~position)
        if position not in self._outputs or changed is False:
            return output, None
        copied = _copied(output)
        if changed is not None:
            return copied, None
        alias = copied.detach()  # of the same version, and not what the call made
        return copied, (~position, alias, _state(alias))

    @property
    def copies_outputs(self) -> bool:
        """Whether a call's outputs are handed out as copies, or some of them are."""
        return any(self._seen.get(~position) is not False for position in self._outputs)

    def is_new(self, position: int) -> bool:
        """Whether no call has ended yet that was watched there."""
        return position not in self._seen

    def note(self, watched: Watched) -> None:
        """Note whether it was changed between a call and its backward, which begins."""
        position, tensor, before = watched
        self._seen[position] = bool(self._seen.get(position)) or _state(tensor) != before

    def note_none(self, watched: Watched) -> None:
        """Note that a call had no backward."""
        self._seen.setdefault(watched[0], None)


def _state(tensor: torch.Tensor) -> tuple[int, Any]:
    """Give what differs once a tensor is changed, whether torch counts the change or not."""
    return tensor._version, checksum(tensor)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor in its layout, which the plan was made for, with what its elements share."""
    layout = tensor.shape, tensor.stride()
    if torch._debug_has_internal_overlap(tensor) != 1:  # 1: some dimension has a stride of 0
        copied = torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device)
        return copied.copy_(tensor)
    span = 1 + sum((size - 1) * stride for size, stride in zip(*layout, strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(*layout, 0)


def _exposed_inputs(capture: Capture) -> frozenset[int]:
    """List inputs that a backward would not read if everything was stored, as in eager.

    Inputs that the region writes to, or gives out views of, are left out: a copy is another tensor.
    """
    graph, program = capture.graph, capture.program
    read = read_by_backward(graph, store_all(graph))
    handed_or_written = {
        output.base for output in program.outputs if output.kind in ("input", "input_view")
    }
    handed_or_written |= {write.target for write in program.writes.values()}
    read |= {program.storage[name] for name in handed_or_written if name in program.storage}
    return frozenset(
        int(item.key)
        for item in program.inputs
        if item.kind == "input" and program.storage.get(item.variable, "") not in read
    )


def _exposed_outputs(capture: Capture) -> frozenset[int]:
    """List outputs from which something may be computed again, but that eager would not keep.

    Those that are views of one another, or of inputs, are left out, and those that are made when
    they are read.
    """
    graph, program = capture.graph, capture.program
    kept = read_by_backward(graph, store_all(graph))
    later = {program.returned[position] for position in program.deferred}
    read = {value for op in graph.ops if op.name != graph.boundary for value in op.inputs}
    storages = [
        program.storage.get(output.base if output.kind == "view" else output.variable, "")
        for output in program.outputs
    ]
    return frozenset(
        position
        for position, (output, storage) in enumerate(zip(program.outputs, storages, strict=True))
        if output.kind in ("fresh", "view")
        and output.base not in later
        and storage in read - kept
        and storages.count(storage) == 1
    )
