"""What schedules of one graph hold over time, as a small SVG picture that stands still.

Text and axes take the colour of the text around the picture, so that it suits a dark page, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import pairwise

from remat_graph.drawing.picture import readable_bytes
from remat_graph.graph import Graph
from remat_graph.schedule import Compute, Schedule, simulate

__all__ = ["memory_to_svg"]

_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 220, 8, 22
_MOST_POINTS = 400  # of a line; of each stretch the largest is drawn
_COLOURS = ("#3b82f6", "#8b93a1", "#2aa876", "#f28c28")


def memory_to_svg(
    graph: Graph, schedules: Mapping[str, Schedule], *, budget_bytes: int | None = None
) -> str:
    """Draw what each schedule holds while its operations run, from left to right by their times.

    `schedules` are by the name that they are given in the picture; `budget_bytes` is a dashed line.

    Raises:
        InvalidSchedule: if one is no schedule of the graph.
    """
    lines = {name: _line(graph, schedule) for name, schedule in schedules.items()}
    end = max((line[-1][0] for line in lines.values()), default=0.0) or 1.0
    top = max((size for line in lines.values() for _, size in line), default=0)
    top = max(top, budget_bytes or 0, 1)

    def place(time: float, size: float) -> str:
        x = _LEFT + (_WIDTH - 2 * _LEFT) * time / end
        y = _HEIGHT - 4 - (_HEIGHT - 4 - _TOP) * size / top
        return f"{x:.1f},{y:.1f}"

    drawn = []
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        corners = [place(0, 0)]
        for (time, size), (until, _) in pairwise(line):
            corners += [place(time, size), place(until, size)]
        corners.append(place(line[-1][0], 0))
        most = readable_bytes(max(size for _, size in line))
        drawn.append(
            f'<polyline points="{" ".join(corners)}" fill="none" stroke="{colour}"/>'
            f'<text x="{_LEFT + 230 * number}" y="14" fill="{colour}">{escape(name)}, {most}</text>'
        )
    if budget_bytes is not None:
        (x, y), far = place(0, budget_bytes).split(","), _WIDTH - _LEFT
        drawn.append(
            f'<path d="M{x} {y}H{far}" stroke="#e0433a" stroke-dasharray="5 4"/>'
            f'<text x="{far}" y="{float(y) - 4:.1f}" fill="#e0433a" text-anchor="end">'
            f"budget, {readable_bytes(budget_bytes)}</text>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" style="max-width:100%" font-family="sans-serif" font-size="12">'
        f'{"".join(drawn)}<path d="M{_LEFT} {_HEIGHT - 4}H{_WIDTH - _LEFT}" '
        'stroke="currentColor" opacity="0.5"/></svg>'
    )


def _line(graph: Graph, schedule: Schedule) -> list[tuple[float, int]]:
    """List when something else is held, and how much; the last point is the end."""
    during = simulate(graph, schedule).during_bytes
    time, points = 0.0, []
    for step, size in zip(schedule.steps, during, strict=True):
        if isinstance(step, Compute):
            points.append((time, size))
            time += graph.ops[graph.op_index[step.op]].time
    stretch = -(-len(points) // _MOST_POINTS) or 1
    thinned = [
        (points[first][0], max(size for _, size in points[first : first + stretch]))
        for first in range(0, len(points), stretch)
    ]
    return [*thinned, (time, 0)]
