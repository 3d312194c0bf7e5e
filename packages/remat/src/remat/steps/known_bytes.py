"""What a step takes at least, known without a record: by the options of its calls.

What a call keeps between its halves and takes in one of them is its option's to say, and the
gradients that regions have given are there to see. What eager code holds beside them is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from remat.steps.region_calls import RegionCall

__all__ = ["HandedOut", "KnownBytes", "NewGradients"]


class HandedOut:
    """The outputs of a call, which are counted with what it keeps, and may be let go of."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in outputs}
        new: Any = StorageWeakRef
        self._storages = [
            (new(tensor.untyped_storage()), tensor.untyped_storage().nbytes())
            for tensor in storages.values()
            if tensor.layout is torch.strided
        ]

    @property
    def gone_bytes(self) -> int:
        """Sum those that nobody holds any more."""
        return sum(size for storage, size in self._storages if storage.expired())


class NewGradients:
    """The parameters of a call that had no gradients before it."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.of: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {
            id(tensor): (weakref.ref(tensor), tensor.nbytes)
            for tensor in tensors
            if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
            if tensor.grad is None
        }


class KnownBytes:
    """The most that a step is known to have taken at once, as far as that is over the budget."""

    def __init__(self) -> None:
        self.most = self.told = 0
        self._given: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def see(
        self, open_calls: Iterable[RegionCall], needed: int, budget: int, own: RegionCall | None
    ) -> None:
        """See so many bytes needed by one call beside what the other open calls keep."""
        kept = [(call.option.kept_bytes, call.handed) for call in open_calls if call is not own]
        kept.append((needed, own.handed if own is not None else HandedOut(())))
        given = self._given.values()
        at_most = sum(size for size, _ in kept) + sum(size for _, size in given)
        if at_most > max(budget, self.most):
            known = sum(size - handed.gone_bytes for size, handed in kept)
            known += sum(size for parameter, size in given if _has(parameter(), size))
            self.most = max(self.most, known if known > budget else 0)

    def give(self, gradients: NewGradients) -> None:
        """Note that the backward of a call has given out its gradients."""
        self._given.update(gradients.of)


def _has(parameter: torch.Tensor | None, size: int) -> bool:
    """Whether it has a gradient with memory of its own, which no bucket is."""
    gradient = None if parameter is None else parameter.grad
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.untyped_storage().nbytes() == size
    )
