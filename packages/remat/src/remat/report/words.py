"""Sizes and times in words."""

from __future__ import annotations

__all__ = ["mib", "mib_or_dash", "ms"]


def mib(size: float) -> str:
    """Format a size in MiB."""
    return f"{size / 2**20:,.1f} MiB"


def mib_or_dash(size: int | None) -> str:
    """Format a measured size in MiB, or say that there is none."""
    return "not measured" if size is None else mib(size)


def ms(seconds: float) -> str:
    """Format a time in milliseconds, or in microseconds if it is less than a hundredth of one."""
    if 0 < seconds < 1e-5:
        return f"{1e6 * seconds:,.2g} µs"
    return f"{1000 * seconds:,.2f} ms"
