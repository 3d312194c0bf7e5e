"""What CUDA's caching allocator held at most, for several who ask at once.

The allocator has one set of maxima, which whoever asks starts anew: all get to know what they were
who watch the device before that. A tensor gets a block of a multiple of 512 bytes; one of more than
1 MiB may be up to 1 MiB larger than that, since smaller remainders are not split off (unless torch
was started with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`). So there are three figures:
what tensors asked for, which follows from a schedule; the blocks that they got, which no other
tensor can have and which a budget bounds; and what the allocator holds of the device.

A block is active from when a tensor gets it to when another can: one that a second stream used, as
those of prefetchers and collectives are, is so beyond the life of its tensor.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["CudaMemory", "blocks_in_use", "make_workspaces", "paused"]

_watching: weakref.WeakSet[CudaMemory] = weakref.WeakSet()


class CudaMemory:
    """Watches one device from now on; sizes in bytes, beyond what was held at the start.

    `requested_bytes` is the most that was asked for, `reserved_bytes` the most that the allocator
    held of the device, all of it.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.requested_bytes = 0
        self.reserved_bytes = 0
        make_workspaces(self.device)
        held = _take_maxima(self.device)
        self._before = _blocks(held, "current")
        self._requested_before = int(held["requested_bytes"]["all"]["current"])
        self._since_mark = 0
        _watching.add(self)

    def mark(self) -> tuple[int, int]:
        """Give what blocks hold now, and the most that they held since the last mark."""
        held = _blocks(_take_maxima(self.device), "current") - self._before
        peak, self._since_mark = self._since_mark, held
        return held, peak

    def see(self, maxima: Any) -> None:
        """Note the maxima of the allocator, which are about to start anew."""
        blocks = _blocks(maxima, "peak") - self._before
        requested = int(maxima["requested_bytes"]["all"]["peak"]) - self._requested_before
        self._since_mark = max(self._since_mark, blocks)
        self.requested_bytes = max(self.requested_bytes, requested)
        self.reserved_bytes = max(self.reserved_bytes, maxima["reserved_bytes"]["all"]["peak"])


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Let all who watch see nothing of the maxima of a block, so that others can watch there."""
    before = list(_watching)
    devices = {each.device for each in before}
    for device in devices:
        _take_maxima(device)
    _watching.clear()
    try:
        yield
    finally:
        for device in devices:
            _take_maxima(device)
        _watching.update(before)


def _take_maxima(device: torch.device) -> Any:
    """Tell all who watch the maxima of the allocator, start them anew, and give its figures then.

    No block waits for a stream then. If one did, all are waited for, and to allocate is to see
    that; else the device goes on: to wait at each mark would hold up a step that is recorded.
    """
    figures = torch.cuda.memory_stats_as_nested_dict(device)
    waits = _some_wait(figures)
    if waits:
        torch.cuda.synchronize(device)
        figures = torch.cuda.memory_stats_as_nested_dict(device)
    for other in list(_watching):
        if other.device == device:
            other.see(figures)
    if waits:
        torch.empty(1, dtype=torch.uint8, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_stats_as_nested_dict(device)


def _some_wait(figures: Any) -> bool:
    """Whether a block that was freed is active still, until another stream is done with it.

    An allocator that counts no active ones frees none later.
    """
    active, allocated = (
        int(figures[name]["all"]["current"]) for name in ("active_bytes", "allocated_bytes")
    )
    return active > allocated


def _blocks(figures: Any, which: str) -> int:
    """Read what blocks hold that no other tensor can have; some allocators count no active ones."""
    return max(int(figures[name]["all"][which]) for name in ("active_bytes", "allocated_bytes"))


def blocks_in_use(device: torch.device) -> int:
    """Give the bytes of the blocks that no other tensor can have now; 0 before the first one."""
    figures = torch.cuda.memory_stats_as_nested_dict(device)
    return _blocks(figures, "current") if figures else 0


def make_workspaces(device: torch.device) -> None:
    """Let cuBLAS allocate what it keeps: 9 to 33 MiB for each thread and stream that multiplies.

    The backward pass runs in a thread of autograd's, which has its own. A plan is rehearsed in the
    thread of the caller, plain autograd is not: without this the one would count it, the other not.
    Where torch refuses products, as deterministic algorithms do without `CUBLAS_WORKSPACE_CONFIG`,
    it refuses those of the model.
    """
    with (
        contextlib.suppress(RuntimeError),
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
    ):
        like = torch.empty(0, device=device, requires_grad=True)
        product: Any = _Products.apply(like)  # type: ignore[no-untyped-call]
        torch.autograd.grad(product, like, product)


class _Products(torch.autograd.Function):
    """Multiply in the forward and in the backward, by cuBLAS and, with a bias, by cuBLASLt.

    What a thread of autograd's still holds when the backward has returned takes no bytes.
    """

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor) -> torch.Tensor:
        return _multiply(like)

    @staticmethod
    def backward(ctx: Any, like: torch.Tensor) -> torch.Tensor:
        return _multiply(like)


def _multiply(like: torch.Tensor) -> torch.Tensor:
    matrix = torch.ones(16, 16, device=like.device)  # made first: it readies CUDA in a new thread
    torch.addmm(matrix[0], matrix, matrix) @ matrix
    return torch.empty_like(like)
