"""What runs the operators of a plan: eager kernels, or those that TorchInductor compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from remat.errors import RematError
from remat.planning.flags import check_flag
from remat_graph import Numerics

if TYPE_CHECKING:
    from remat_graph.torch import Capture

__all__ = ["Kernels", "read_kernels", "why_no_groups"]

Kernels = Literal["eager", "inductor"]


def read_kernels(kernels: str, numerics: Numerics | None, *, wait: bool) -> Numerics | None:
    """Read which kernels run; give how far results may differ then.

    Raises:
        RematError: if there are no such kernels, results may not differ as they do by these, or
            there is nothing to wait for, or `wait` is neither on nor off.
    """
    check_flag("wait", wait)
    if kernels not in get_args(Kernels):
        there_are = " or ".join(map(repr, get_args(Kernels)))
        raise RematError(f"kernels={kernels!r}; give {there_are}")
    if kernels == "eager":
        if wait:
            raise RematError("wait=True waits for compiled kernels; give kernels='inductor', too")
        return numerics
    if numerics is Numerics.BITWISE:
        raise RematError(
            "kernels='inductor' rounds in other places than eager kernels do; leave out "
            "numerics='bitwise', or take kernels='eager'"
        )
    return numerics or Numerics.ROUNDING


def why_no_groups(
    kernels: Kernels, offered: Capture, captured: Capture, *, can_compile: bool
) -> str | None:
    """Say why nothing of a capture is compiled, of one that was offered, if groups were asked for.

    `None` if it is, or they were not.
    """
    if kernels == "eager" or captured.unfused is not None:
        return None
    if offered.unfused is not None:
        return "compiled groups are slower within this budget, or do not fit it"
    if not can_compile:
        return "there is no compiler, as the log says"
    return "compiled groups are made beside the steps, and planned for when they are there"
