import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("remat_cases")
os.environ["REMAT_CACHE"] = "0"  # neither read nor write what is of the user
os.environ.pop("REMAT_PLANS", None)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of factories for the command."""
    from remat_cases.commands import FACTORY

    monkeypatch.setattr(sys, "path", [*sys.path])  # where the command puts the folder of the file
    (tmp_path / "nets.py").write_text(FACTORY)
    return tmp_path / "nets.py"


@pytest.fixture
def graph(file, tmp_path):
    """The graph of a model in a file, beside the file of the plan that it comes from."""
    from remat_cases.commands import run_json

    import remat
    from remat_graph import save

    made = run_json("plan", f"{file}:net", "--budget", "1MiB", "--save", tmp_path / "all.json")
    assert made["recomputations"] == 0
    save(remat.Plan.load(tmp_path / "all.json").graph, tmp_path / "graph.json")
    return tmp_path / "graph.json"
