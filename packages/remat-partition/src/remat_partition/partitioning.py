"""The one door: run a partitioner and check what comes back before anyone sees it."""

from __future__ import annotations

from remat_graph import Graph, Hierarchy
from remat_partition import registry
from remat_partition.errors import BrokenPartitioner, PartitionError
from remat_partition.interface import Partitioner

__all__ = ["partition"]


def partition(graph: Graph, *, partitioner: str | Partitioner) -> Hierarchy:
    """Cut a graph with an installed partitioner, or with one that the caller has made.

    The result is checked: it is a `Hierarchy`, and so a tree of convex blocks in execution order
    with acyclic quotients that holds every forward op once, and it is one of this very graph.

    Raises:
        PartitionError: what the partitioner raises where it cannot cut the graph.
        UnknownPartitioner, DuplicatePartitioner: as `get_partitioner`.
        BrokenPartitioner: if it does not load, fails in another way, or returns something else.
    """
    if isinstance(partitioner, str):
        plugin = registry.find(partitioner)
        name, origin = plugin.name, plugin.origin
        partitioner = registry.make(plugin)
    else:
        name, origin = partitioner.name, _home(partitioner)
    try:
        found: object = partitioner.partition(graph)
    except PartitionError:
        raise
    except Exception as error:
        raise BrokenPartitioner(name, origin, f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Hierarchy):
        raise BrokenPartitioner(name, origin, f"it returned a {type(found).__name__}, no Hierarchy")
    if found.graph != graph:
        raise BrokenPartitioner(name, origin, "it returned a hierarchy of another graph")
    return found


def _home(partitioner: Partitioner) -> str:
    kind = type(partitioner)
    return f"{kind.__module__}.{kind.__qualname__}"
