"""Where a solver needs a hierarchy, the graph is cut: by `h-partition`, or as was asked for."""

from __future__ import annotations

from remat.errors import RematError
from remat_graph import Graph, Hierarchy
from remat_partition import Partitioner, get_partitioner, partition
from remat_solvers import Solver, get_solver

__all__ = ["check_method", "hierarchy_for"]

_DEFAULT = "h-partition"


def check_method(solver: str | Solver, partitioner: str | Partitioner | None) -> None:
    """Load what was asked for, before there is a graph.

    Raises:
        SolverError: if the solver does not exist or cannot be loaded.
        PartitionError: if the partitioner does not.
        RematError: if there is a partitioner, and the solver needs no hierarchy.
    """
    needed = _needs_hierarchy(solver)
    if partitioner is None:
        return
    get_partitioner(partitioner)
    if not needed:
        raise RematError(
            f"partitioner={partitioner!r}, but solver={solver!r} takes the graph as it is; leave "
            f"the partitioner out, or use a solver that needs a hierarchy, such as 'h-ilp'"
        )


def hierarchy_for(
    graph: Graph, solver: str | Solver, partitioner: str | Partitioner | None = None
) -> Hierarchy | None:
    """Cut a graph for a solver, or `None` where it takes the graph as it is.

    Raises:
        SolverError: if the solver does not exist or cannot be loaded.
        PartitionError: if the partitioner does not, or the graph cannot be cut.
    """
    if not _needs_hierarchy(solver):
        return None
    return partition(graph, partitioner=_DEFAULT if partitioner is None else partitioner)


def _needs_hierarchy(solver: str | Solver) -> bool:
    return solver != "auto" and get_solver(solver).needs_hierarchy
