"""A plan as one HTML file, which needs no network: pictures, and tables that can be sorted.

The pictures are plotly's, which writes its own code into the file (about 5 MB). Whatever comes from
a model or a file is escaped, and the page may load nothing from elsewhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from remat.errors import RematError
from remat.report.curve import Curve
from remat.report.explanation import Explanation, Part, explain
from remat.report.figures import curve_figure, memory_figure, treemap_figure
from remat_graph import Graph, Schedule, printable
from remat_solvers import store_all

__all__ = ["Chapter", "check_plotly", "report_page"]

_MOST_ROWS = 1000
_ALONE = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
_CONFIG = {"responsive": True, "displayModeBar": False}
_BETWEEN = (
    " How long the code between the regions runs is not known: it is drawn as if it took none."
)
_COLUMNS = {
    "part": "The module, and the source line that is not torch's own.",
    "kept, MiB": "Held while the loss runs, between forward and backward.",
    "packed, MiB": "Of it, in a form of fewer bytes.",
    "again, MiB": "Made a second time or more, counted each time.",
    "runs": "How often any of its operations runs in one step.",
    "again, ms": "Time that making again takes.",
    "once, ms": "Time of making everything once, forward and backward.",
    "other ways": "Operations that run in place of those that were traced.",
    "at the peak, MiB": "Held at the moment at which the most is held.",
    "why": "What speaks for it.",
}


@dataclass(frozen=True, slots=True)
class Chapter:
    """A graph and its schedule, to be shown on a page.

    `limit` is what `budget_bytes` is called. `lower_bound` is a time, in seconds, that nothing
    within the budget beats; `curve` is drawn if there is one. `plain` is a schedule that stores
    everything, if not that of `store_all`. Of a `step_of_regions`, what the code between them holds
    stands at moments of no length, and parts are left to the chapters of the regions.
    """

    title: str
    graph: Graph
    schedule: Schedule
    budget_bytes: int
    limit: str = "the budget"
    lower_bound: float | None = None
    curve: Curve | None = None
    plain: Schedule | None = None
    step_of_regions: bool = False


def check_plotly() -> None:
    """Ask before work whether a report can be made.

    Raises:
        RematError: if plotly is missing.
    """
    if importlib.util.find_spec("plotly") is None:
        raise RematError("a report needs plotly; pip install 'remat[report]'")


def report_page(title: str, facts: Sequence[tuple[str, str]], chapters: Sequence[Chapter]) -> str:
    """Write the page: what is known of the plan, and a chapter for each graph.

    Raises:
        RematError: if plotly is missing.
    """
    check_plotly()
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 - an extra

    own = files("remat.report")
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in facts)
    body = "\n".join(
        part for number, chapter in enumerate(chapters) for part in _chapter(chapter, number)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_ALONE}">
<title>{_text(title)}</title>
<style>{(own / "page.css").read_text()}</style>
<script>{get_plotlyjs()}</script>
</head>
<body>
<h1>{_text(title)}</h1>
<dl>{rows}</dl>
{body}
<script>{(own / "page.js").read_text()}</script>
</body>
</html>
"""


def _chapter(chapter: Chapter, number: int) -> Iterator[str]:
    graph, schedule, budget = chapter.graph, chapter.schedule, chapter.budget_bytes
    plain = store_all(graph) if chapter.plain is None else chapter.plain
    lines = explain(graph, schedule, budget, limit=chapter.limit)
    yield f"<h2>{_text(chapter.title)}</h2>"
    yield "<h3>Memory over the step</h3>"
    yield (
        "<p>What is held while each operation runs, by the costs of the plan: forward, loss, "
        f"backward. The most is held at {_text(str(lines.peak))}. Orange points are computed "
        "again. Point at a line to see the operation and where it comes from."
        f"{_BETWEEN if chapter.step_of_regions else ''}</p>"
    )
    memory = memory_figure(graph, schedule, plain, budget, chapter.limit)
    yield _drawn(memory, f"memory{number}")
    yield "<h3>Time against memory</h3>"
    yield f"<p>{_about_curve(chapter)}</p>"
    curve = curve_figure(graph, schedule, plain, chapter.lower_bound, chapter.curve)
    yield _drawn(curve, f"curve{number}")
    if chapter.step_of_regions:
        return
    modules = explain(graph, schedule, budget, by="module", limit=chapter.limit)
    if any(part.kept_bytes or part.recomputed_bytes for part in modules.parts):
        yield "<h3>What is kept and what is computed again</h3>"
        yield (
            "<p>Areas are bytes, kept or made again; the more orange, the more is made again. "
            "Press a module to look into it.</p>"
        )
        yield _drawn(treemap_figure(modules.parts), f"modules{number}")
    yield from _table(lines)


def _about_curve(chapter: Chapter) -> str:
    if chapter.curve is None:
        return (
            "Lower left is better. Where this plan stands; the whole curve takes more solving, and "
            "is drawn if asked for (<code>curve=True</code>, <code>--curve</code>)."
        )
    text = "Lower left is better. The least time found within each budget"
    beaten = ", and what no schedule in the order of the graph can beat"
    return f"{text}{beaten if chapter.curve.bounds else ''}."


def _drawn(figure: Any, name: str) -> str:
    drawn: str = figure.to_html(
        full_html=False, include_plotlyjs=False, div_id=name, config=_CONFIG, default_width="100%"
    )
    return drawn


def _table(explanation: Explanation) -> Iterator[str]:
    parts = sorted(explanation.parts, key=lambda p: p.kept_bytes + p.recomputed_bytes, reverse=True)
    shown = parts[:_MOST_ROWS]
    figures = [_figures(part) for part in shown]
    used = [any(column) for column in zip(*figures, strict=True)] if figures else []
    heads = list(_COLUMNS.items())
    names = [heads[0], *(h for h, u in zip(heads[1:-1], used, strict=False) if u), heads[-1]]
    words = (heads[0], heads[-1])
    yield "<h3>By module and source line</h3>"
    yield (
        f"<p>{len(shown):,} of {len(parts):,} parts, the largest first; press a head to sort.</p>"
        '<div class="wide"><table><thead><tr>'
    )
    for name, meaning in names:
        kind = ' class="words"' if (name, meaning) in words else ""
        button = f'<button title="{_text(meaning)}">{_text(name)}</button>'
        yield f'<th scope="col"{kind}>{button}</th>'
    yield "</tr></thead><tbody>"
    for part, row in zip(shown, figures, strict=True):
        cells = (_cell(figure) for figure, u in zip(row, used, strict=True) if u)
        place = f"{_text(part.label)}<small>{_text(part.source)}</small>"
        yield (
            f'<tr><td class="words">{place}</td>{"".join(cells)}'
            f'<td class="words">{_text(part.why)}</td></tr>'
        )
    yield "</tbody></table></div>"


def _figures(part: Part) -> list[float]:
    """List what stands between the first and the last column."""
    return [
        part.kept_bytes / 2**20,
        part.packed_bytes / 2**20,
        part.recomputed_bytes / 2**20,
        part.most_runs if part.most_runs > 1 else 0,
        1000 * part.recompute_time,
        1000 * part.time,
        part.other_ways,
        part.peak_bytes / 2**20,
    ]


def _text(name: str) -> str:
    """Escape a name for HTML, and replace what no document may contain."""
    return escape(printable(name))


def _cell(figure: float) -> str:
    text = "" if not figure else f"{figure:,}" if isinstance(figure, int) else f"{figure:,.2f}"
    return f'<td data-figure="{figure:.6g}">{text}</td>'
