"""The pictures of a report, as figures of plotly: memory over the step, the curve, a treemap.

Names come from models and files: each is escaped, since plotly takes some tags in texts. Of a long
schedule so many points are drawn, of each stretch the one at which the most is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from remat.report.curve import Curve
from remat.report.explanation import Part
from remat.report.lifetimes import compute_steps
from remat.report.words import mib, ms
from remat_graph import Graph, Provenance, Schedule, printable, simulate

__all__ = ["curve_figure", "memory_figure", "treemap_figure"]

_MOST_POINTS = 3000
_ROOMY = 0.06  # of the picture, for more than a name; on a phone names stand alone
_PLANNED, _PLAIN, _AGAIN, _BUDGET, _BOUND = "#3b82f6", "#8b93a1", "#f28c28", "#e0433a", "#2aa876"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class _Point:
    """An operation that runs from `start` seconds on, what is held then, and whether it is again.

    `text` says in plotly's markup which operation it is.
    """

    start: float
    held_bytes: int
    again: bool
    text: str


def memory_figure(
    graph: Graph, schedule: Schedule, plain: Schedule, budget_bytes: int, limit: str
) -> Any:
    """Draw what is held over the step, as planned and by `plain`, which stores everything."""
    import plotly.graph_objects as go  # noqa: PLC0415 - an extra

    figure = go.Figure()
    for name, steps, colour in (
        ("storing everything", plain, _PLAIN),
        ("this plan", schedule, _PLANNED),
    ):
        points = _points(graph, steps)
        end = simulate(graph, steps).time
        figure.add_scatter(
            x=[*(1000 * point.start for point in points), 1000 * end],
            y=[*(point.held_bytes / _MIB for point in points), 0],
            text=[*(point.text for point in points), ""],
            name=name,
            line={"shape": "hv", "width": 1.5, "color": colour},
            fill="tozeroy" if steps is schedule else None,
            hovertemplate="%{y:,.1f} MiB at %{x:,.2f} ms<br>%{text}",
        )
    again = [point for point in _points(graph, schedule) if point.again]
    figure.add_scatter(
        x=[1000 * point.start for point in again],
        y=[point.held_bytes / _MIB for point in again],
        text=[point.text for point in again],
        name="computed again",
        mode="markers",
        marker={"size": 5, "color": _AGAIN},
        hovertemplate="%{y:,.1f} MiB at %{x:,.2f} ms<br>again: %{text}",
    )
    figure.add_hline(
        y=budget_bytes / _MIB,
        line={"dash": "dash", "width": 1.5, "color": _BUDGET},
        annotation={"text": f"{_safe(limit)}, {mib(budget_bytes)}", "font": {"color": _BUDGET}},
        annotation_position="top left",
    )
    begin = _backward_begins(graph, schedule)
    if begin is not None:
        figure.add_vline(
            x=1000 * begin,
            line={"dash": "dot", "width": 1, "color": _PLAIN},
            annotation={
                "text": "backward begins",
                "font": {"color": _PLAIN},
                "yanchor": "bottom",
            },
            annotation_position="top right",
        )
    return _laid_out(figure, "time, ms", "held, MiB")


def _backward_begins(graph: Graph, schedule: Schedule) -> float | None:
    """Give the time of all that runs before the first backward operation."""
    time = 0.0
    for _, name in compute_steps(schedule):
        if name == graph.boundary:
            return time
        time += graph.ops[graph.op_index[name]].time
    return None


def curve_figure(
    graph: Graph,
    schedule: Schedule,
    plain: Schedule,
    lower_bound: float | None,
    curve: Curve | None,
) -> Any:
    """Draw time against peak: this plan, storing everything, and what no schedule can beat."""
    import plotly.graph_objects as go  # noqa: PLC0415 - an extra

    figure = go.Figure()
    everything, planned = simulate(graph, plain), simulate(graph, schedule)
    least = everything.time

    def add(name: str, points: Sequence[tuple[int, float]], **style: Any) -> None:
        figure.add_scatter(
            x=[size / _MIB for size, _ in points],
            y=[100 * (time / least - 1) if least else 0 for _, time in points],
            text=[ms(time) for _, time in points],
            name=name,
            hovertemplate=f"{name}<br>%{{x:,.1f}} MiB, %{{text}}, %{{y:,.2f}}% more",
            **style,
        )

    if curve is not None:
        # A schedule serves every larger budget, a bound holds at every smaller one.
        add("found", curve.points, line={"shape": "hv", "color": _PLANNED, "width": 1.5})
        if curve.bounds:
            bound = {"shape": "vh", "color": _BOUND, "width": 1.5}
            add("no schedule is faster", curve.bounds, line=bound)
    marks = [
        ("storing everything", everything.peak_bytes, everything.time, _PLAIN, "square"),
        ("this plan", planned.peak_bytes, planned.time, _PLANNED, "circle"),
    ]
    if lower_bound is not None:
        marks.append(
            ("bound at its budget", planned.peak_bytes, lower_bound, _BOUND, "triangle-up")
        )
    for name, size, time, colour, symbol in marks:
        shown = {"size": 9 if colour == _BOUND else 15, "color": colour, "symbol": symbol}
        add(name, [(size, time)], mode="markers", marker=shown, cliponaxis=False)
    figure.update_xaxes(rangemode="tozero")
    return _laid_out(figure, "peak, MiB", "time beyond storing everything, %")


def treemap_figure(parts: Sequence[Part]) -> Any:
    """Draw what is kept and what is computed again, by module: areas are bytes."""
    import plotly.graph_objects as go  # noqa: PLC0415 - an extra

    sums: dict[tuple[str, ...], list[float]] = {}
    for part in parts:
        path = tuple(part.module.split(".")) if part.module else ()
        figures = (part.kept_bytes, part.recomputed_bytes, part.recompute_time)
        if not any(figures):
            continue
        for length in range(len(path) + 1):
            so_far = sums.setdefault(path[:length], [0, 0, 0])
            sums[path[:length]] = [a + b for a, b in zip(so_far, figures, strict=True)]
    shown = {path: sizes for path, sizes in sums.items() if sizes[0] + sizes[1] > 0}
    whole = sum(shown[()][:2]) if () in shown else 0
    figure = go.Figure(
        go.Treemap(
            ids=["/" + "/".join(path) for path in shown],
            labels=[_safe(path[-1]) if path else "(model)" for path in shown],
            parents=["/" + "/".join(path[:-1]) if path else "" for path in shown],
            values=[kept + again for kept, again, _ in shown.values()],
            text=[f"{mib(kept)} kept<br>{mib(again)} again" for kept, again, _ in shown.values()],
            texttemplate=[
                "%{label}<br>%{text}" if kept + again > _ROOMY * whole else "%{label}"
                for kept, again, _ in shown.values()
            ],
            customdata=[
                [_safe(".".join(path)) or "the whole model", ms(time)]
                for path, (_, _, time) in shown.items()
            ],
            branchvalues="total",
            maxdepth=4,
            hovertemplate="%{customdata[0]}<br>%{text}, %{customdata[1]}<extra></extra>",
            marker={
                "colors": [again / (kept + again) for kept, again, _ in shown.values()],
                "colorscale": [[0, "#cfe0fb"], [0.5, "#fbe3c4"], [1, "#f5a14f"]],
                "cmin": 0,
                "cmax": 1,
                "line": {"width": 1, "color": "#ffffff"},
                "colorbar": {
                    "title": {"text": "computed again", "side": "top"},
                    "tickformat": ".0%",
                    "thickness": 10,
                    "orientation": "h",
                    "len": 0.5,
                    "y": 0,
                    "yanchor": "top",
                    "tickvals": [0, 0.5, 1],
                },
            },
            textfont={"color": "#1c2430"},
            pathbar={"textfont": {"color": "#1c2430"}},
            tiling={"pad": 2},
        )
    )
    _laid_out(figure, None, None)
    figure.update_layout(uniformtext={"minsize": 9, "mode": "hide"}, margin={"b": 70})
    return figure


def _laid_out(figure: Any, x: str | None, y: str | None) -> Any:
    """Leave colours of text and grid to the page, which knows whether it is dark."""
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 56, "r": 8, "t": 24, "b": 44} if x else {"l": 4, "r": 4, "t": 24, "b": 4},
        legend={"orientation": "h", "y": 1.06, "yanchor": "bottom", "x": 0},
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#808080"},
        hovermode="closest",
        hoverlabel={"align": "left"},
        height=420,
    )
    axis = {"gridcolor": "rgba(128,128,128,0.25)", "zerolinecolor": "rgba(128,128,128,0.5)"}
    if x:
        figure.update_xaxes(title_text=x, tickformat=",", ticklabelstandoff=6, **axis)
        figure.update_yaxes(
            title_text=y, rangemode="tozero", tickformat=",", automargin=True, **axis
        )
    return figure


def _points(graph: Graph, schedule: Schedule) -> list[_Point]:
    """List the operations that a schedule runs; of a long one, those at which the most is held."""
    during = simulate(graph, schedule).during_bytes
    ops = [(step, graph.ops[graph.op_index[op]]) for step, op in compute_steps(schedule)]
    starts = [0.0, *accumulate(op.time for _, op in ops)]
    seen: set[str] = set()
    points = []
    for start, (step, op) in zip(starts, ops, strict=False):
        place = op.provenance or Provenance()
        words = (f"{op.name} ({op.stage.value})", place.module, place.source)
        text = "<br>".join(_safe(word) for word in words if word)
        points.append(_Point(start, during[step], op.name in seen, text))
        seen.add(op.name)
    return list(_thinned(points))


def _thinned(points: list[_Point]) -> Iterator[_Point]:
    stretch = -(-len(points) // _MOST_POINTS) or 1
    for first in range(0, len(points), stretch):
        yield max(points[first : first + stretch], key=lambda point: point.held_bytes)


def _safe(name: str) -> str:
    """Escape a name for plotly, which knows these entities."""
    return printable(name).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
