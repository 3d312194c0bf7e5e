"""Options that are on or off."""

from __future__ import annotations

from remat.errors import RematError

__all__ = ["check_flag"]


def check_flag(name: str, flag: object) -> None:
    """Check an option that is on or off: any text would be on.

    Raises:
        RematError: if it is neither `True` nor `False`.
    """
    if not isinstance(flag, bool):
        raise RematError(f"{name}={flag!r}; give True or False")
