"""A hierarchy as an SVG picture, drawn here, so that looking at one needs no other program.

Every block is laid out by itself (see `layout`) and stands as one box in the block around it. An
arrow is drawn in the innermost block that holds both its ends, between the members they are in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

from remat_graph.drawing.layout import Layout, Point, lay_out
from remat_graph.drawing.picture import Arrow, Box, Picture, draw, printable, readable_bytes
from remat_graph.hierarchy import Hierarchy

__all__ = ["to_svg"]

_CHARACTER, _LINE = 6.8, 18.0
_MARGIN = 10.0
_STYLE = (
    "text{font:11px monospace;fill:#223}"
    "rect{stroke:#8896a5;stroke-width:1}"
    "path{fill:none;stroke:#667788;stroke-linecap:round}"
    ".soft{stroke-dasharray:3 4}"
)


def to_svg(hierarchy: Hierarchy, *, fold: bool = False) -> str:
    """Draw the forward half, top to bottom; with `fold`, open only one block of a class.

    Arrows are as thick as what they carry. Hovering over a box or an arrow says what it holds.
    """
    picture = draw(hierarchy, fold=fold)
    placed = _place(picture.root, _arrows_by_block(picture))
    body = "\n".join(_draw(placed, (_MARGIN, _MARGIN), _most_bytes(placed)))
    width, height = (round(side + 2 * _MARGIN) for side in (placed.width, placed.height))
    size = f'width="{width}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">\n'
        f"<style>{_STYLE}</style>\n"
        f'<rect {size} style="fill:white;stroke:none"/>\n{body}\n</svg>\n'
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """A box with its size, and its members laid out in it."""

    box: Box
    width: float
    height: float
    members: tuple[_Placed, ...] = ()
    arrows: tuple[Arrow, ...] = ()
    layout: Layout | None = None


_Ends = tuple[int, int]


def _arrows_by_block(picture: Picture) -> dict[str, dict[_Ends, Arrow]]:
    """Gather arrows by the innermost open block with both ends, between positions in it."""
    path: dict[str, tuple[tuple[str, int], ...]] = {}

    def walk(box: Box, above: tuple[tuple[str, int], ...]) -> None:
        for position, member in enumerate(box.members):
            here = (*above, (box.key, position))
            if member.members:
                walk(member, here)
            else:
                path[member.key] = here

    walk(picture.root, ())
    carried: dict[str, dict[_Ends, dict[str, int]]] = {}
    for arrow in picture.arrows:
        for (block, i), (_, j) in zip(path[arrow.source], path[arrow.target], strict=False):
            if i != j:
                carried.setdefault(block, {}).setdefault((i, j), {}).update(arrow.values)
                break
    return {
        block: {ends: Arrow(block, block, values) for ends, values in arrows.items()}
        for block, arrows in carried.items()
    }


def _place(box: Box, arrows: Mapping[str, Mapping[_Ends, Arrow]]) -> _Placed:
    title = _CHARACTER * len(_title(box)) + 14
    if not box.members:
        return _Placed(box, title, _LINE + 4)
    members = tuple(_place(member, arrows) for member in box.members)
    own = arrows.get(box.key, {})
    layout = lay_out([(member.width, member.height) for member in members], list(own))
    width = max(layout.width, title) + 2 * _MARGIN
    height = layout.height + _LINE + 2 * _MARGIN
    return _Placed(box, width, height, members, tuple(own.values()), layout)


def _title(box: Box) -> str:
    return f"{box.title} · {box.ops} ops" if box.is_block else box.title


def _most_bytes(placed: _Placed) -> int:
    own = max((arrow.size_bytes for arrow in placed.arrows), default=0)
    return max(own, *(_most_bytes(member) for member in placed.members), 1)


def _draw(placed: _Placed, corner: Point, most: int) -> Iterator[str]:
    box, (x, y) = placed.box, corner
    fill = box.colour or "white"
    dashes = ' stroke-dasharray="6 2"' if box.is_block and not box.members else ""
    hover = f"{box.title}: {box.ops} ops, {box.seconds:.3g} s forward"
    yield (
        f'<g><title>{_text(hover)}</title><rect x="{x:.0f}" y="{y:.0f}" '
        f'width="{placed.width:.0f}" height="{placed.height:.0f}" rx="5" fill="{fill}"{dashes}/>'
        f'<text x="{x + 7:.0f}" y="{y + 15:.0f}">{_text(_title(box))}</text></g>'
    )
    if placed.layout is None:
        return
    slack = placed.width - 2 * _MARGIN - placed.layout.width
    left, top = x + _MARGIN + slack / 2, y + _MARGIN + _LINE
    for member, (dx, dy) in zip(placed.members, placed.layout.corners, strict=True):
        yield from _draw(member, (left + dx, top + dy), most)
    for arrow, route in zip(placed.arrows, placed.layout.routes, strict=True):
        width = 0.8 + 3.2 * (arrow.size_bytes / most) ** 0.5
        kind = "" if arrow.values else ' class="soft"'
        hover = readable_bytes(arrow.size_bytes) if arrow.values else "order only"
        points = [(left + px, top + py) for px, py in route]
        yield (
            f'<path d="{_curve(points)}" stroke-width="{width:.1f}"{kind}>'
            f"<title>{_text(hover)}</title></path>"
        )


def _text(content: str) -> str:
    return escape(printable(content))


def _curve(points: list[Point]) -> str:
    """Join points by curves that leave and arrive vertically."""
    (x, y), *rest = points
    parts = [f"M{x:.0f} {y:.0f}"]
    for next_x, next_y in rest:
        if abs(next_x - x) < 1:
            parts.append(f"V{next_y:.0f}" if next_y - y >= 1 else "")
        else:
            bend = (next_y - y) / 2
            parts.append(
                f"C{x:.0f} {y + bend:.0f} {next_x:.0f} {next_y - bend:.0f} "
                f"{next_x:.0f} {next_y:.0f}"
            )
        x, y = next_x, next_y
    return "".join(parts)
