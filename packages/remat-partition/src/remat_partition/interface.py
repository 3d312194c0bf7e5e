"""What a partitioner is: the seam at which distributions plug in."""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeGuard, runtime_checkable

from remat_graph import Graph, Hierarchy

__all__ = ["Partitioner", "is_partitioner"]


@runtime_checkable
class Partitioner(Protocol):
    """Cuts the forward half of a training graph into a hierarchy of blocks.

    An entry point in the group `remat.partitioners` names a class of these that can be made without
    arguments. Its options are keyword arguments of the class, with defaults: `partition` hands on
    those that its caller gives, and refuses those that the class does not name. An option with a
    value that will not do is an `InvalidOption`. Equal graphs must get equal hierarchies: what is
    random takes a seed as an option.
    """

    name: ClassVar[str]

    def partition(self, graph: Graph) -> Hierarchy:
        """Cut a graph.

        Raises:
            PartitionError: if it cannot cut this graph, saying why.
        """
        ...


def is_partitioner(thing: object) -> TypeGuard[Partitioner]:
    """Say whether something is a partitioner with a name, rather than the class of one."""
    if isinstance(thing, type) or not isinstance(thing, Partitioner):
        return False
    name: object = thing.name
    return isinstance(name, str)
