"""A hierarchy as text for Graphviz: nested clusters, identical blocks in one colour."""

from __future__ import annotations

from collections.abc import Iterator

from remat_graph.drawing.picture import Box, draw, printable, readable_bytes
from remat_graph.hierarchy import Hierarchy

__all__ = ["to_dot"]

_HEAD = """digraph hierarchy {
  graph [fontname="Helvetica", fontsize=11, style="rounded,filled"]
  node [fontname="Helvetica", fontsize=10, shape=box, style="rounded,filled"]
  edge [color="#667788", arrowsize=0.6]"""


def to_dot(hierarchy: Hierarchy, *, fold: bool = False) -> str:
    """Write the forward half as a DOT graph; with `fold`, open only one block of a class.

    Blocks are clusters, arrows are as thick as what they carry, and dashed if that is only order.
    """
    picture = draw(hierarchy, fold=fold)
    number = {box.key: i for i, box in enumerate(picture.root.boxes())}
    most = max((arrow.size_bytes for arrow in picture.arrows), default=0) or 1
    lines = [_HEAD, *_box(picture.root, number, "  ")]
    for arrow in picture.arrows:
        width = 0.6 + 3.0 * (arrow.size_bytes / most) ** 0.5
        tooltip = f'tooltip="{readable_bytes(arrow.size_bytes)}"'
        style = tooltip if arrow.values else "style=dashed"
        lines.append(
            f"  n{number[arrow.source]} -> n{number[arrow.target]} [penwidth={width:.2f}, {style}]"
        )
    return "\n".join((*lines, "}")) + "\n"


def _box(box: Box, number: dict[str, int], indent: str) -> Iterator[str]:
    own = number[box.key]
    colour = box.colour or "white"  # said of every box, as a cluster inherits that around it
    label = _quoted(f"{box.title} ({box.ops} ops)" if box.is_block else box.title)
    if not box.members:
        peripheries = ", peripheries=2" if box.is_block else ""
        yield f'{indent}n{own} [label={label}, fillcolor="{colour}"{peripheries}]'
        return
    yield f"{indent}subgraph cluster_{own} {{"
    yield f"{indent}  label={label}"
    yield f'{indent}  fillcolor="{colour}"'
    for member in box.members:
        yield from _box(member, number, indent + "  ")
    yield f"{indent}}}"


def _quoted(text: str) -> str:
    """Write a label, in which Graphviz reads escapes and HTML entities."""
    escaped = printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
    return f'"{escaped}"'
