"""From nested node numbers to a `Hierarchy`, with names that say where a block stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from remat_graph import Block, Graph, Hierarchy

__all__ = ["Member", "build"]

# The position of a forward op in the graph, or a block as the members that it has, in order.
Member: TypeAlias = "int | Sequence[Member]"


def build(graph: Graph, members: Sequence[Member]) -> Hierarchy:
    """Make the hierarchy whose root has these members.

    A block is called by its position in the block around it, after that one's own name: `"3.0"` is
    the first member of the fourth member of the root.
    """
    return Hierarchy(graph, Block("root", _named(graph, members, "")))


def _named(graph: Graph, members: Sequence[Member], prefix: str) -> tuple[str | Block, ...]:
    named: list[str | Block] = []
    for i, member in enumerate(members):
        if isinstance(member, int):
            named.append(graph.ops[member].name)
        else:
            named.append(Block(f"{prefix}{i}", _named(graph, member, f"{prefix}{i}.")))
    return tuple(named)
