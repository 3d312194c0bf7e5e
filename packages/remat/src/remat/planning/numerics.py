"""What may differ of the numbers, as the user says it."""

from __future__ import annotations

from remat.errors import RematError
from remat_graph import Numerics

__all__ = ["read_numerics"]


def read_numerics(numerics: str | None) -> Numerics | None:
    """Read how far results may differ.

    Raises:
        RematError: if there is no such way.
    """
    if numerics is None:
        return None
    if numerics not in list(Numerics):
        there_are = ", ".join(repr(each.value) for each in Numerics)
        raise RematError(f"numerics={numerics!r}; give {there_are}, or None")
    return Numerics(numerics)
