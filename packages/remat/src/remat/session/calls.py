"""One call of a region, from its forward to the end of its backward."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat.errors import BudgetWarning
from remat.planning.task import RunnablePlan
from remat.plans.reads import read_by_backward
from remat.session.changes import Changes, Watched
from remat.session.leaving import Hooked
from remat.session.recording import RecordedCall
from remat.session.region import Region
from remat_exec import BudgetExceeded, DeferredTensor, RepeatExceeded, Runnable
from remat_graph.torch import LossCost, Mark
from remat_solvers.step import RegionOption

__all__ = ["Call", "HandedOut", "NewGradients", "see_read", "warn_exceeded"]


_weak: Any = StorageWeakRef


class HandedOut:
    """The outputs of a call, which are counted with what it keeps, and may be let go of.

    Of so many `unseen` bytes of them it is not known whether they are.
    """

    def __init__(self, unseen: int = 0) -> None:
        self._unseen = unseen
        self._storages: list[tuple[Any, int, str]] = []

    def add(self, tensor: torch.Tensor, value: str) -> None:
        """Count an output, of this value, unless another of the same memory is counted."""
        if isinstance(tensor, DeferredTensor) or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if all(ref.cdata != storage._cdata or ref.expired() for ref, *_ in self._storages):
            self._storages.append((_weak(storage), storage.nbytes(), value))

    def gone_bytes(self, without: Collection[str] = ()) -> int:
        """Sum those that nobody holds any more, as far as that is known, `without` some values."""
        gone = (size for ref, size, v in self._storages if v not in without and ref.expired())
        return self._unseen + sum(gone)

    def held_bytes(self, without: Collection[str] = ()) -> int:
        """Sum those that are still held, `without` some values."""
        return sum(self.held(without).values())

    def held(self, without: Collection[str] = ()) -> dict[str, int]:
        """Give the bytes of those that are still held, by value, `without` some."""
        return {
            value: size
            for ref, size, value in self._storages
            if value not in without and not ref.expired()
        }

    @property
    def gone(self) -> frozenset[str]:
        """The values that nobody holds any more."""
        return frozenset(value for ref, _, value in self._storages if ref.expired())


class NewGradients:
    """The parameters of a call that had no gradients before it."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.of: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {
            id(tensor): (weakref.ref(tensor), tensor.nbytes)
            for tensor in tensors
            if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
            if tensor.grad is None
        }


@dataclass(eq=False)
class Call:
    """One call of a region.

    One by a plan of its own is `planned`, for these `numbers`; its backward shows what is `missing`
    and what was let go of. `was_read` says that an output was read that may not be made in it,
    `warned` that the user knows that it is over the budget. One of a step of several regions runs
    by an `option`, and goes on by the `lean` one if it gives memory back; `drop` does that.
    `changes` sees what is `watched`. In its backward it is seen whether `outputs_watched` were
    read; those that were made for that before took `reading_bytes`. Until the forward returns,
    `waiting` are the outputs that are watched, or made when they are read. `on_backward` is called
    where its backward begins. The backward of one that shares the budget does not read `let_go`;
    `noted` is what a record has of it.
    """

    region: Region
    executable: Runnable
    on_backward: Callable[[], None]
    position: int = 0
    planned: RunnablePlan | None = None
    numbers: Hashable = None
    missing: frozenset[int] | None = None
    released_outputs: frozenset[int] = frozenset()
    was_read: bool = False
    warned: bool = False
    option: RegionOption | None = None
    lean: RegionOption | None = None
    drop: Callable[[], None] | None = None
    changes: Changes | None = None
    watched: list[Watched] = field(default_factory=list)
    handed: HandedOut = field(default_factory=HandedOut)
    outputs_watched: frozenset[int] = frozenset()
    reading_bytes: int = 0
    waiting: list[weakref.ref[DeferredTensor]] = field(default_factory=list)
    gradients: NewGradients = field(default_factory=lambda: NewGradients(()))
    hooked: Hooked = field(default_factory=dict)
    let_go: frozenset[str] = frozenset()
    lean_let_go: frozenset[str] = frozenset()
    noted: RecordedCall | None = None

    @property
    def kept_bytes(self) -> int:
        """What the call keeps between its halves, if it shares a budget with others."""
        return 0 if self.option is None else self.option.kept_bytes

    @property
    def droppable_bytes(self) -> int:
        """What the call keeps beyond what it must."""
        if self.drop is None or self.lean is None or self.executable.low_memory_plan is None:
            return 0
        return self.kept_bytes - self.lean.kept_bytes

    def go_lean(self) -> None:
        """Give back what can be made again; the backward is that of the lean option then."""
        if self.drop is not None:
            self.drop()
            self.option, self.let_go = self.lean, self.lean_let_go

    def note_held(self, held_on: tuple[int, int], released: Collection[str]) -> None:
        """Note for the record which outputs are there where the backward begins.

        `held_on` are bytes, as a `RecordedCall` has them; `released` are the values of its own that
        nobody holds, or only the backward itself.
        """
        if self.noted is not None:
            size_of, gone = self.executable.capture.size_of, self.let_go & self.handed.gone
            self.noted.let_go_bytes = sum(map(size_of, self.let_go))
            self.noted.gone_bytes = sum(map(size_of, gone))
            self.noted.held_outputs = self.handed.held({*released, *self.let_go})
            self.noted.held_on = held_on

    def end_watch(self) -> None:
        """Note whether what is watched was changed before the backward, which begins."""
        if self.changes is not None:
            for watched in self.watched:
                self.changes.note(watched)
        self.watched.clear()

    def loss_seen(self, planned: RunnablePlan, marks: Sequence[Mark]) -> LossCost:
        """Read off its record what the code between forward and backward took."""
        kept, backward = marks[-3:-1]
        capture = planned.capture
        program, gone = capture.program, capture.released_values(self.released_outputs)
        gradients = {program.storage[name] for name in program.tangents}
        before = kept.held_bytes + sum(map(capture.size_of, gradients))
        if gone:
            gone -= read_by_backward(capture.outline, planned.plan.schedule)
        freed = sum(map(capture.size_of, gone))
        held = max(0, backward.held_bytes + freed - before)
        return LossCost(max(0, backward.peak_bytes - before - held), held)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __del__(self) -> None:
        """Note that there was no backward, if there was none."""
        if self.changes is not None:
            for watched in self.watched:
                self.changes.note_none(watched)


def see_read(call: weakref.ref[Call], region: Region, position: int) -> None:
    """See that an output is read, which takes memory if the call does not make it."""
    region.see_read(position)
    under_way = call()
    if under_way is not None:
        under_way.was_read = True


def warn_exceeded(call: weakref.ref[Call], error: BudgetExceeded) -> None:
    """Warn of a call over the budget, and say what is done about it."""
    under_way = call()
    if under_way is not None:
        under_way.warned = True
    what, _, instead = str(error).partition("; ")
    then = "from the next forward on it is planned for, within the budget"
    if (
        under_way is not None
        and isinstance(error, RepeatExceeded)
        and not under_way.region.leave_room(error)
    ):
        then = "no plan that was found has room for them"
    if "outputs=" in instead:
        then = f"to stay within the budget, {instead}"
    warnings.warn(
        f"{what}. It runs, its gradients are right, and {then}", BudgetWarning, stacklevel=2
    )
