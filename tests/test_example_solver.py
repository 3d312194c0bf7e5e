"""The example plugin, installed by pip into a folder of its own and used from there."""

from pathlib import Path

from integration_cases.installed import use_installed

EXAMPLE = Path(__file__).parents[1] / "examples" / "remat-solver-example"

USE = """
import json, sys
import networkx as nx
from remat_graph import from_networkx, simulate
from remat_solvers import BudgetTooSmall, UnsuitableSolver, cite, list_solvers, solve

name = "drop-cheapest"
found = {"origin": list_solvers()[name].origin}
found["imported_by_listing"] = "remat_solver_example" in sys.modules

depth = 8
dag = nx.DiGraph()
for i in range(depth):
    dag.add_node(f"f{i}", time=1.0, size_bytes=10, position=i)
    dag.add_node(f"b{i}", time=2.0, size_bytes=10, position=2 * depth - 1 - i)
nx.add_path(dag, [f"f{i}" for i in range(depth)])
nx.add_path(dag, [f"b{i}" for i in reversed(range(depth))])
dag.add_edges_from((f"f{i}", f"b{i}") for i in range(depth))
graph = from_networkx(dag)
try:
    solve(graph, 1000, solver=name)
except UnsuitableSolver as error:
    found["without_backward"] = str(error)

import dataclasses
from remat_graph import Stage
ops = tuple(
    dataclasses.replace(op, stage=Stage.BACKWARD if i >= depth else Stage.FORWARD)
    for i, op in enumerate(graph.ops)
)
graph = dataclasses.replace(graph, ops=ops, boundary=ops[depth].name)
reports = []
found["roomy"] = solve(graph, 1000, solver=name).status.value
solution = solve(graph, 70, solver=name, progress=reports.append)
timeline = simulate(graph, solution.schedule)
found.update(
    status=solution.status.value,
    peak=timeline.peak_bytes,
    time=solution.time == timeline.time > graph.time,
    reports=len(reports),
    cite=cite(name),
)
try:
    solve(graph, 25, solver=name)
except BudgetTooSmall as error:
    found["too_small"] = error.status.value
print(json.dumps(found))
"""


def test_the_example_is_installed_listed_and_used(tmp_path):
    found = use_installed(EXAMPLE, tmp_path, USE)
    assert found["origin"] == "remat-solver-example 0.1.0 (remat_solver_example:DropCheapest)"
    assert not found["imported_by_listing"]
    assert "no forward or no backward half" in found["without_backward"]
    assert found["roomy"] == "optimal"
    assert found["status"] == "feasible"
    assert found["peak"] <= 70
    assert found["time"]
    assert found["reports"] > 1
    assert found["too_small"] in ("limit", "infeasible")
    assert "remat-solver-example" in found["cite"]


def test_the_example_uses_only_what_is_public():
    source = (EXAMPLE / "src" / "remat_solver_example" / "__init__.py").read_text()
    imports = [line for line in source.splitlines() if "remat_" in line and "import " in line]
    roots = {line.split()[1] for line in imports if line.startswith("from")}
    assert roots == {"remat_graph", "remat_solvers"}
