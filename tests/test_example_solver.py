"""The example plugin, installed by pip into a folder of its own and used from there."""

from pathlib import Path

import pytest
from integration_cases.installed import use_installed

EXAMPLE = Path(__file__).parents[1] / "examples" / "remat-solver-example"
SOURCE = EXAMPLE / "src" / "remat_solver_example" / "__init__.py"

USE = """
import json, sys
from remat_graph.testing import unit_chain
from remat_solvers import cite, list_solvers, solve
from remat_solvers.testing import check_solver

name = "drop-cheapest"
found = {"origin": list_solvers()[name].origin}
found["imported_by_listing"] = "remat_solver_example" in sys.modules
check = check_solver(name)
found["solved"] = check.solved
solution = solve(unit_chain(12), 9, solver=name)
found.update(peak=solution.peak_bytes, time=solution.time, cite=cite(name))
from remat_solver_example import DropCheapest
found["tries"] = solve(unit_chain(12), 9, solver=DropCheapest(tries=25)).solver
print(json.dumps(found))
"""


@pytest.mark.sweep
def test_the_example_is_installed_listed_and_right(tmp_path):
    found = use_installed(EXAMPLE, tmp_path, USE)
    assert found["origin"] == "remat-solver-example 0.1.0 (remat_solver_example:DropCheapest)"
    assert not found["imported_by_listing"]
    assert found["solved"] > 10
    assert found["peak"] <= 9
    assert found["time"] > 24  # it computes something again
    assert "remat-solver-example" in found["cite"]
    assert found["tries"] == "drop-cheapest(tries=25)"


def test_the_example_is_short_and_uses_only_what_is_public():
    lines = SOURCE.read_text().splitlines()
    code = lines[lines.index('"""', 1) + 1 :]
    assert len([line for line in code if line.strip()]) <= 50
    imports = [line.split()[1] for line in lines if line.startswith("from remat")]
    assert set(imports) == {"remat_graph", "remat_solvers.toolkit"}
