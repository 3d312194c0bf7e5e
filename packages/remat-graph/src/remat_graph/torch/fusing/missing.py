"""Kernels that a plan needs and that are not compiled yet: collected, to be compiled beside steps.

Which groups a plan has is known once some are measured: without those that are slower, or beside
slices, others are found. To compile these within a step would hold it up for seconds.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextvars import ContextVar

from remat_graph.errors import RematError
from remat_graph.torch.fusing.kernel import Kernel
from remat_graph.torch.fusing.sized_code import SizedCode

__all__ = ["KernelsMissing", "kernels_there_alone", "left_missing", "raise_missing", "see_compiled"]

_Collected = dict[Hashable, Kernel]

_collected: ContextVar[_Collected | None] = ContextVar("kernels missing", default=None)
_compiled: Counter[str] = Counter()  # how many codes there are on disk, by what they are for


class KernelsMissing(RematError):
    """A plan needs these kernels, which are not compiled."""

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        self.kernels = tuple(kernels)
        super().__init__(f"{len(self.kernels)} kernels that a plan needs are not compiled")


@contextlib.contextmanager
def kernels_there_alone() -> Iterator[None]:
    """Compile nothing within this: what is not compiled is collected.

    Raises:
        KernelsMissing: at the end, at the latest, if something was.
    """
    token = _collected.set({})
    try:
        yield
        raise_missing()
    finally:
        _collected.reset(token)


def raise_missing() -> None:
    """Go no further with what is planned, if it needs what is not compiled.

    Raises:
        KernelsMissing: if it does.
    """
    collected = _collected.get()
    if collected:
        raise KernelsMissing(collected.values())


def left_missing(kernel: Kernel) -> bool:
    """Whether a kernel is not to be compiled now; then it is collected."""
    collected = _collected.get()
    if collected is None or _is_on_disk(kernel):
        return False
    collected[_name(kernel)] = kernel
    return True


def see_compiled(kernels: Iterable[Kernel]) -> None:
    """See that other processes have compiled these, or tried to: they are loaded in a moment."""
    _compiled.update({_name(kernel) for kernel in kernels})


def _name(kernel: Kernel) -> str:
    sized = _of_sizes(kernel)
    return kernel.key if sized is None else sized.key


def _is_on_disk(kernel: Kernel) -> bool:
    sized = _of_sizes(kernel)
    return _compiled[_name(kernel)] > (0 if sized is None else len(sized.codes))


def _of_sizes(kernel: Kernel) -> SizedCode | None:
    """Give the code of any size by which a kernel may run, if more of that may be compiled."""
    sized = kernel.sized
    return sized if sized is not None and sized.may_have_more else None
