"""What the forward of a step is run again of, for another backward over a graph that is kept.

A backward gives memory back as it goes. With `retain_graph=True` another one may follow; then the
forward runs again before it, within the memory of the plan. Nothing is held for that: inputs are
the user's to hold, and the state of a generator is a few bytes outside the device's allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat_exec.checksums import changed, checksum
from remat_exec.drawing import at_state, read_state
from remat_exec.errors import BackwardError, MemoryChanged
from remat_graph.torch import Program, forward_runs_again

__all__ = ["Repeat", "Repeats", "keeps_graph"]

_weak: Any = StorageWeakRef
_INSTEAD = "run forward again, or add the losses up and run backward once"


def keeps_graph() -> bool:
    """Whether the backward that is under way leaves its graph for another one."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


class Repeats(NamedTuple):
    """How other backwards over a graph that is kept are planned for.

    So many bytes are planned for what earlier backwards gave out, which is most often held in
    `.grad`, and for outputs that are there twice. Inputs are held where others may let go of them.
    """

    room_bytes: int = 0
    holds_inputs: bool = False


class Repeat:
    """The inputs of a forward, and where its generators stood before it.

    The graph `is_kept` if the last backward over it left it.
    """

    def __init__(self, program: Program, bound: Sequence[Any], planned: Repeats) -> None:
        self.is_kept, self.planned_bytes = False, planned.room_bytes
        self._program, self._held = program, list(bound) if planned.holds_inputs else []
        self._given: list[tuple[Any, int]] = []
        self._names: Sequence[str] = program.taken
        self._items = [weakref.ref(i) if isinstance(i, torch.Tensor) else i for i in bound]
        devices = {call.random for call in program.calls.values() if call.random is not None}
        self._states = {device: read_state(device) for device in sorted(devices, key=str)}
        self._after: dict[torch.device, int] = {}
        self._versions: list[int | None] = []
        self._sums: dict[str, Any] | None = None

    def begin_backward(self) -> None:
        """See whether the backward that begins keeps the graph."""
        self.is_kept = keeps_graph()
        if not self.is_kept:  # the graph may be there for as long as its outputs are
            self._held, self._names, self._items = [], (), []
        elif self._sums is None:
            self._note_sums()

    def see_given(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """See what a backward gives out, if another one may follow."""
        if self.is_kept:
            storages = [each.untyped_storage() for each in gradients if each is not None]
            self._given += [(_weak(storage), storage.nbytes()) for storage in storages]

    @property
    def given_bytes(self) -> int:
        """Sum what was given out and is still held."""
        return sum(size for storage, size in self._given if not storage.expired())

    def note(self, bound: Sequence[Any]) -> None:
        """See what the inputs are once the forward has written to some of them, and has drawn."""
        self._after = self._drawn()
        self._versions = [getattr(item, "_version", None) for item in bound]
        if self._held:
            self._note_sums()

    def _drawn(self) -> dict[torch.device, int]:
        return {device: hash(read_state(device)) for device in self._states}

    def _note_sums(self) -> None:
        """Keep checksums of the inputs: in the first step from where it is seen that it matters."""
        self._sums = {name: checksum(tensor) for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        refs = zip(self._names, self._items, strict=True)
        found = ((name, item()) for name, item in refs if isinstance(item, weakref.ref))
        return {name: tensor for name, tensor in found if tensor is not None}

    def inputs(self) -> list[Any]:
        """Give the inputs as they were, with copies of what the forward writes to.

        Raises:
            BackwardError: if they are gone or have changed, or if it cannot run a second time.
        """
        if not forward_runs_again(self._program):
            raise BackwardError(
                "backward runs a second time over the same forward, which would have to run again, "
                "and it decides something (topk, argmax, ...), sends something or reads a buffer "
                f"that it writes; {_INSTEAD}"
            )
        targets = {write.target for write in self._program.writes.values()}
        found = []
        for name, item, version in zip(self._names, self._items, self._versions, strict=True):
            tensor: Any = item() if isinstance(item, weakref.ref) else item
            if isinstance(item, weakref.ref) and tensor is None:
                raise BackwardError(
                    "backward runs a second time over the same forward, which is run again for it, "
                    f"and an input of the model is gone; {_INSTEAD}. The next ones are held"
                )
            if getattr(tensor, "_version", None) != version:
                raise BackwardError(
                    f"{name}, a parameter or input, was changed in place since the forward, which "
                    f"a second backward runs again; run it before changing it"
                )
            found.append(tensor.clone() if name in targets else tensor)
        for name in changed(self._sums or {}, self._tensors()):
            raise MemoryChanged(
                f"{name}, a parameter, an input or a buffer, was written to where torch does not "
                f"count it, as through .data, numpy or DLPack, and a second backward runs the "
                f"forward again; run it before"
            )
        return found

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw as the forward did, and put the generators back.

        Raises:
            BackwardError: if others drew at the same time, so that the same cannot be drawn.
        """
        with at_state(self._states):
            yield
            if self._drawn() != self._after:
                raise BackwardError(
                    "a second backward cannot draw the same random numbers again: another thread "
                    "drew from torch's generators at the same time; give what that thread runs a "
                    "torch.Generator of its own"
                )
