"""A plan in a notebook: what `print` says of it, and what is held over the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from remat_graph import Graph, Schedule, memory_to_svg

__all__ = ["notebook_page"]


def notebook_page(
    rows: Iterable[tuple[str, str]],
    graph: Graph,
    schedules: Mapping[str, Schedule],
    budget_bytes: int,
) -> str:
    """Write a table of what is known, and a picture of what the named schedules hold, as HTML."""
    table = "".join(
        f'<tr><td style="text-align:left">{escape(name)}</td>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in rows
    )
    picture = memory_to_svg(graph, schedules, budget_bytes=budget_bytes)
    return f"<table>{table}</table>{picture}"
