"""The one door: run a partitioner and check what comes back before anyone sees it."""

from __future__ import annotations

from remat_graph import Graph, Hierarchy
from remat_partition.errors import BrokenPartitioner, PartitionError
from remat_partition.interface import Partitioner
from remat_partition.registry import resolve_partitioner

__all__ = ["partition"]


def partition(
    graph: Graph,
    *,
    max_top_ops: int | None = None,
    max_block_ops: int | None = None,
    alpha: float | None = None,
    partitioner: str | Partitioner = "h-partition",
    **options: object,
) -> Hierarchy:
    """Cut a graph with an installed partitioner, or with one that the caller has made.

    `max_top_ops` bounds the members of the root, `max_block_ops` those of every other block, where
    a member is an op or a block; `alpha` weighs the length of a block against the bytes at its
    border (HiRemate, equation 1). What is None is left to the partitioner: see `HPartition` for its
    defaults. These and further `options` go to the partitioner, which must have them.

    The result is checked: it is a `Hierarchy`, and so a tree of convex blocks in execution order
    with acyclic quotients that holds every forward op once, and it is one of this very graph.

    Raises:
        InvalidOption: if an option has a value that it cannot have.
        UnknownOption: if the partitioner has no such option, or is an object, which has its own.
        PartitionError: if `graph` is no graph or `partitioner` no partitioner; and what the
            partitioner raises where it cannot cut the graph.
        UnknownPartitioner, DuplicatePartitioner: as `get_partitioner`.
        BrokenPartitioner: if it does not load, fails in another way, or returns something else.
    """
    bounds = {"max_top_ops": max_top_ops, "max_block_ops": max_block_ops, "alpha": alpha}
    if not isinstance(graph, Graph):
        raise PartitionError(
            f"need a remat_graph.Graph, not a {type(graph).__name__}; "
            f"remat_graph.from_networkx reads one from a networkx.DiGraph"
        )
    options |= {option: value for option, value in bounds.items() if value is not None}
    chosen = resolve_partitioner(partitioner, options)
    name, origin = chosen.name, chosen.origin
    try:
        hierarchy: object = chosen.partitioner.partition(graph)
    except PartitionError:
        raise
    except (Exception, SystemExit) as error:
        raise BrokenPartitioner(name, origin, f"{type(error).__name__}: {error}") from error
    if not isinstance(hierarchy, Hierarchy):
        raise BrokenPartitioner(
            name, origin, f"it returned a {type(hierarchy).__name__}, no Hierarchy"
        )
    if hierarchy.graph != graph:
        raise BrokenPartitioner(name, origin, "it returned a hierarchy of another graph")
    return hierarchy
