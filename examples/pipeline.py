"""A graph that is no model: tables of a nightly report, planned for a disk that is too small.

Each step of the pipeline reads tables and writes one. A table that was deleted can be made again;
the plan says what to make when, and what to delete, in the least time.
"""

import networkx as nx

from remat_graph import Compute, from_networkx, simulate
from remat_solvers import solve, store_all

GB = 10**9
STEPS = {  # minutes, size, what it reads
    "orders": (30, 80 * GB, []),
    "customers": (5, 10 * GB, []),
    "clean": (10, 70 * GB, ["orders"]),
    "joined": (25, 120 * GB, ["clean", "customers"]),
    "daily": (8, 5 * GB, ["joined"]),
    "features": (40, 90 * GB, ["joined"]),
    "model": (60, 1 * GB, ["features"]),
    "scores": (20, 15 * GB, ["features", "model"]),
    "audit": (10, 2 * GB, ["clean", "scores"]),
    "report": (5, 1 * GB, ["daily", "scores", "audit", "customers"]),
}


def main() -> None:
    dag = nx.DiGraph()
    for name, (minutes, size, reads) in STEPS.items():
        dag.add_node(name, time=float(minutes), size_bytes=size)
        dag.add_edges_from((table, name) for table in reads)
    graph = from_networkx(dag, results={"model", "report"})
    everything = simulate(graph, store_all(graph))
    budget = int(0.8 * everything.peak_bytes)
    solution = solve(graph, budget)
    print(f"{everything.peak_bytes / GB:.0f} GB in {everything.time:.0f} minutes, or")
    print(f"{solution.peak_bytes / GB:.0f} GB in {solution.time:.0f} minutes; within a budget of")
    print(f"{budget / GB:.0f} GB nothing is below {solution.lower_bound:.0f} minutes:")
    for step in solution.schedule:
        print(f"  make {step.op}" if isinstance(step, Compute) else f"  delete {step.value}")
    assert simulate(graph, solution.schedule).peak_bytes <= budget < everything.peak_bytes
    assert everything.time < solution.time <= 1.2 * everything.time


if __name__ == "__main__":
    main()
