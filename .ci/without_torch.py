"""Use the installed wheels where there is no torch; the argument says which.

Every module is imported, so that a dependency which is used but not declared is missed.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

from remat_graph import Block, Graph, Hierarchy, Op, Schedule, Stage, Value, simulate

LAYERS = 6


def chain() -> Graph:
    """Build a chain of layers with its backward, in which each layer's output is read twice."""
    values = [Value(f"a{i}", 100) for i in range(LAYERS)]
    values += [Value(f"g{i}", 100) for i in range(LAYERS)]
    ops = [
        Op(f"F{i}", (f"a{i - 1}",) if i else (), (f"a{i}",), 1.0, equivalence="layer")
        for i in range(LAYERS)
    ]
    for i in reversed(range(LAYERS)):
        reads = (f"a{i}",) if i == LAYERS - 1 else (f"a{i}", f"g{i + 1}")
        ops.append(Op(f"B{i}", reads, (f"g{i}",), 2.0, stage=Stage.BACKWARD, twin=f"F{i}"))
    return Graph(tuple(values), tuple(ops), results=frozenset({"g0"}), boundary=f"B{LAYERS - 1}")


def check_imports(name: str) -> None:
    """Import all modules of a package but those that are for torch."""
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if ".torch" not in module.name:
            importlib.import_module(module.name)


def check_graph(graph: Graph) -> None:
    """Write a graph and read it again."""
    import remat_graph

    assert remat_graph.decode(remat_graph.encode(graph)) == graph


def check_partition(graph: Graph) -> None:
    """Run a partitioner through the installed package."""
    import remat_partition

    class Flat:
        name = "flat"

        def partition(self, graph: Graph) -> Hierarchy:
            """Put everything into one block."""
            forward = graph.ops[: graph.boundary_index]
            return Hierarchy(graph, Block("root", tuple(op.name for op in forward)))

    found = remat_partition.partition(graph, partitioner=Flat())
    assert len(found.root.members) == LAYERS
    remat_partition.list_partitioners()


def check_solvers(graph: Graph) -> None:
    """Solve a small problem under a budget that forces a recomputation."""
    import remat_solvers

    budget = 100 * (LAYERS - 1)
    solution = remat_solvers.solve(graph, budget)
    assert isinstance(solution.schedule, Schedule)
    timeline = simulate(graph, solution.schedule)
    assert timeline.peak_bytes <= budget
    assert timeline.time == solution.time > graph.time
    assert "store-all" in remat_solvers.list_solvers()


if __name__ == "__main__":
    checks = {"graph": check_graph, "partition": check_partition, "solvers": check_solvers}
    check_imports(f"remat_{sys.argv[1]}")
    checks[sys.argv[1]](chain())
    assert "torch" not in sys.modules
