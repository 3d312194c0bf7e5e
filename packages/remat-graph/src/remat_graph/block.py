"""A block of a hierarchy: a tree of operations in execution order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remat_graph.errors import InvalidGraph

__all__ = ["Block"]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the forward graph: operations of its own and smaller blocks, in execution order.

    Members may be given as a list; they are kept as a tuple.

    Raises:
        InvalidGraph: if the members are a string.
    """

    name: str
    members: tuple[str | Block, ...]

    def __post_init__(self) -> None:
        if isinstance(self.members, str):
            raise InvalidGraph(
                f"block {self.name!r} has the string {self.members!r} for members; "
                f"give a tuple of names and blocks"
            )
        object.__setattr__(self, "members", tuple(self.members))

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
