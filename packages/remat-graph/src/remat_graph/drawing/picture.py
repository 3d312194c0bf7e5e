"""What a picture of a hierarchy shows, whatever draws it: boxes in boxes, arrows, colours.

A block is a box around its members. Blocks of one class have one colour, and blocks that are like
no other have none. With `fold`, only the first block of a class is open, and the others are closed
boxes: a model of a hundred equal layers is then one layer and ninety-nine boxes. Linear time in the
dependencies, for each level of the hierarchy.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from remat_graph.block import Block
from remat_graph.graph import Stage
from remat_graph.hierarchy import Hierarchy

__all__ = ["Arrow", "Box", "Picture", "draw", "printable", "readable_bytes"]

_GOLDEN_RATIO = 0.618034


@dataclass(frozen=True, slots=True)
class Box:
    """An op or a block; a folded block shows no members. Keys are unique, titles may not be."""

    key: str
    title: str
    is_block: bool
    ops: int
    seconds: float
    colour: str | None
    members: tuple[Box, ...] = ()

    def boxes(self) -> Iterator[Box]:
        """Yield this box and those in it, outer ones first."""
        yield self
        for member in self.members:
            yield from member.boxes()


@dataclass(frozen=True, slots=True)
class Arrow:
    """The values, with their sizes, that one box reads of another, wherever they are.

    Without any it is soft: an order that carries nothing.
    """

    source: str
    target: str
    values: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        """The bytes of all that it carries."""
        return sum(self.values.values())


@dataclass(frozen=True, slots=True)
class Picture:
    """Boxes in one another, and arrows, by key, between those that show no members."""

    root: Box
    arrows: tuple[Arrow, ...]


def draw(hierarchy: Hierarchy, *, fold: bool = False) -> Picture:
    """Decide what a picture of the forward half of a hierarchy shows."""
    colours = _colours(hierarchy)
    class_of = {
        member.name: unique.hash for unique in hierarchy.unique_blocks for member in unique.members
    }
    opened: set[str] = set()
    shown_as: dict[str, str] = {}

    def boxed(member: str | Block) -> Box:
        if isinstance(member, str):
            shown_as[member] = f"op {member}"
            op = hierarchy.graph.ops[hierarchy.graph.op_index[member]]
            return Box(f"op {member}", member, False, 1, op.time, None)
        key, own_class = f"block {member.name}", class_of[member.name]
        names = list(member.op_names())
        time = sum(hierarchy.graph.ops[hierarchy.graph.op_index[name]].time for name in names)
        folded = fold and own_class in opened
        opened.add(own_class)
        if folded:
            shown_as.update(dict.fromkeys(names, key))
        inside = () if folded else tuple(boxed(inner) for inner in member.members)
        return Box(key, member.name, True, len(names), time, colours.get(own_class), inside)

    return Picture(boxed(hierarchy.root), tuple(_arrows(hierarchy, shown_as)))


def printable(text: str) -> str:
    """Replace what no document may contain: control characters, lone surrogates."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def readable_bytes(count: int) -> str:
    """Write a number of bytes in the unit that suits it."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def _colours(hierarchy: Hierarchy) -> dict[str, str]:
    """Give each class of several blocks a colour of its own, light enough to write on."""
    shared = [unique.hash for unique in hierarchy.unique_blocks if len(unique.members) > 1]
    colours = {}
    for i, key in enumerate(shared):
        rgb = colorsys.hls_to_rgb((0.55 + i * _GOLDEN_RATIO) % 1.0, 0.86, 0.65)
        colours[key] = "#" + "".join(f"{round(255 * part):02x}" for part in rgb)
    return colours


def _arrows(hierarchy: Hierarchy, shown_as: dict[str, str]) -> Iterator[Arrow]:
    graph = hierarchy.graph
    carried: dict[tuple[str, str], dict[str, int]] = {}
    for op in graph.ops:
        if op.stage is not Stage.FORWARD:
            break
        target = shown_as[op.name]
        for v in op.inputs:
            if v in graph.producer:
                source = shown_as[graph.ops[graph.producer[v]].name]
                carried.setdefault((source, target), {})[v] = graph.value_by_name[v].size_bytes
        for earlier in op.order_after:
            carried.setdefault((shown_as[earlier], target), {})
    for (source, target), values in carried.items():
        if source != target:
            yield Arrow(source, target, values)
