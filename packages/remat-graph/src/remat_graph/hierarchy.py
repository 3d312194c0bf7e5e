"""A hierarchy of blocks over the forward operations of a graph.

Each backward operation sits with its twin, so a hierarchy only names forward operations. The tree
is what H-Partition makes (HiRemate, section 3.1) and what hierarchical solvers consume.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remat_graph.errors import InvalidGraph
from remat_graph.graph import Graph, Stage

__all__ = ["Block", "Hierarchy"]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the forward graph: operations of its own and smaller blocks, in execution order."""

    name: str
    members: tuple[str | Block, ...]

    def op_names(self) -> Iterator[str]:
        """Yield the forward operations of this block and of those below it, in order."""
        for member in self.members:
            if isinstance(member, Block):
                yield from member.op_names()
            else:
                yield member

    def blocks(self) -> Iterator[Block]:
        """Yield this block and all below it, parents first."""
        yield self
        for member in self.members:
            if isinstance(member, Block):
                yield from member.blocks()


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A tree of blocks in which every forward operation of `graph` occurs exactly once.

    Raises:
        InvalidGraph: naming an op that is missing, repeated, backward or unknown, a block name used
            twice, or an empty block.
    """

    graph: Graph
    root: Block

    def __post_init__(self) -> None:
        forward = {op.name for op in self.graph.ops if op.stage is Stage.FORWARD}
        names: set[str] = set()
        for block in self.root.blocks():
            if block.name in names:
                raise InvalidGraph(f"two blocks are called {block.name!r}; names must be unique")
            names.add(block.name)
            if not block.members and forward:
                raise InvalidGraph(f"block {block.name!r} is empty; leave it out")
        seen: set[str] = set()
        for op in self.root.op_names():
            if op not in forward:
                raise InvalidGraph(f"a block holds {op!r}, which is no forward op of the graph")
            if op in seen:
                raise InvalidGraph(f"op {op!r} is in two blocks; each op belongs to one")
            seen.add(op)
        missing = sorted(forward - seen)
        if missing:
            raise InvalidGraph(f"op {missing[0]!r} is in no block ({len(missing)} missing in all)")
