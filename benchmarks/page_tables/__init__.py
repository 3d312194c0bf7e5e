"""The tables of README and docs, each made of one file of results."""

from __future__ import annotations

from collections.abc import Callable

from page_tables import front, planning, sizes, solving, training

__all__ = ["TABLES"]

TABLES: dict[str, Callable[[], str]] = {
    **front.TABLES,
    **training.TABLES,
    **sizes.TABLES,
    **planning.TABLES,
    **solving.TABLES,
}
