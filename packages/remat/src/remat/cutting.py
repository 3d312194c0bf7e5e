"""Where a solver needs a hierarchy, the graph is cut by `h-partition` with its defaults."""

from __future__ import annotations

from remat_graph import Graph, Hierarchy
from remat_partition import partition
from remat_solvers import get_solver

__all__ = ["hierarchy_for"]


def hierarchy_for(graph: Graph, solver: str) -> Hierarchy | None:
    """Cut a graph for a solver, or `None` where it takes the graph as it is.

    Raises:
        SolverError: if the solver does not exist or cannot be loaded.
        PartitionError: if the graph cannot be cut.
    """
    if solver == "auto" or not get_solver(solver).needs_hierarchy:
        return None
    return partition(graph)
