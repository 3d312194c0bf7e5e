"""The tour can be followed: its changes, made in a copy where it says, pass the tests it names."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from remat.session.step import StepState
from remat_solvers.testing import check_solver

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "docs" / "tour.md").read_text()
CHANGES = {title: text for title, _, text in (part.partition("\n") for part in TOUR.split("\n## "))}
FENCE = re.compile(r"^( *)```\w+\n(.*?)\n *```", re.MULTILINE | re.DOTALL)
GRAPH, SOLVERS = "packages/remat-graph", "packages/remat-solvers"
REWRITES = f"{GRAPH}/src/remat_graph/torch/rewrites"
CAPTURE = f"{GRAPH}/tests/capture"
PACKAGES = ("remat-graph", "remat-partition", "remat-solvers", "remat-exec", "remat")


def blocks(title):
    return [textwrap.dedent(block) + "\n" for _, block in FENCE.findall(CHANGES[title])]


class Copy:
    """A copy of the packages and of what tests need, to be changed."""

    def __init__(self, root):
        self.root = root
        ignored = shutil.ignore_patterns("__pycache__", "torch_models", ".*_cache", ".hypothesis")
        for name in ("packages", "tests"):
            shutil.copytree(ROOT / name, root / name, ignore=ignored)
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, root)

    def put(self, path, before, new):
        """Put lines above the one that begins with `before`, in its indentation."""
        lines = (self.root / path).read_text().splitlines(keepends=True)
        (at,) = (at for at, line in enumerate(lines) if line.lstrip().startswith(before))
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines.insert(at, textwrap.indent(new, indent))
        (self.root / path).write_text("".join(lines))

    def replace(self, path, old, new):
        """Replace what stands there once."""
        text = (self.root / path).read_text()
        assert text.count(old) == 1
        (self.root / path).write_text(text.replace(old, new))

    def append(self, path, new):
        (self.root / path).write_text(f"{(self.root / path).read_text()}\n\n{new}")

    def run(self, *arguments):
        """Run tests of the copy, whose packages come before those that are installed."""
        sources = [str(self.root / "packages" / name / "src") for name in PACKAGES]
        path = os.pathsep.join([*sources, str(self.root)])
        command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
        environment = os.environ | {"PYTHONPATH": path}
        ran = subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stdout
        return ran.stdout


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


@pytest.mark.sweep
def test_an_operator_that_can_run_in_place(copy):
    record, test = blocks("An operator that can run in place")
    operators = f"{GRAPH}/src/remat_graph/torch/operators.py"
    copy.put(operators, "aten.relu.default: Operator(", record)
    tests = f"{CAPTURE}/test_in_place.py"
    copy.put(tests, "aten.relu.default: [()],", "aten.exp.default: [()],\n")
    copy.append(tests, test)
    assert "6 passed" in copy.run(tests, "-k", "exp or all_that_may_overwrite")


@pytest.mark.sweep
def test_a_solver(copy):
    module, point, test = blocks("A solver")
    path = f"{SOLVERS}/src/remat_solvers/published/baselines/evict_cheapest.py"
    assert path.removeprefix(f"{SOLVERS}/src/") in CHANGES["A solver"]
    (copy.root / path).write_text(module)
    info = copy.root / "installed-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[remat.solvers]\n" + point.replace('"', ""))
    copy.append(f"{SOLVERS}/tests/test_baselines.py", test)
    ran = copy.run(f"{SOLVERS}/tests", "-k", "evict_cheapest or evict-cheapest")
    assert "5 passed" in ran


def test_the_solver_has_no_fault():
    made = {}
    exec(blocks("A solver")[0], made)
    check_solver(made["EvictCheapest"], problems=10)


@pytest.mark.sweep
def test_a_pass(copy):
    function, record, case = blocks("A pass")
    name, simplify = "drop_double_negations", f"{REWRITES}/simplify.py"
    copy.replace(simplify, '"drop_copies", ', f'"drop_copies", "{name}", ')
    copy.put(simplify, "def merge_equal(", f"{function}\n\n")
    copy.put(f"{REWRITES}/passes.py", "drop_copies,", f"{name},\n")
    masks = '    Pass(\n        "name-causal-masks",\n'
    copy.replace(f"{REWRITES}/passes.py", masks, textwrap.indent(record, "    ") + masks)
    passes, trains = f"{CAPTURE}/test_passes.py", "tests/test_passes.py"
    copy.replace(passes, '"merge-equal", "name', '"merge-equal", "drop-double-negations", "name')
    copy.put(passes, '("name-causal-masks", ', case)
    copy.put(trains, '"drop-copies",', '"drop-double-negations",\n')
    for tests in (passes, trains):
        copy.replace(tests, "self.out(h.clone())", "self.out(h.clone()).neg().neg()")
    copy.run(passes, trains)
    ran = copy.run(passes, trains, "-m", "sweep or not sweep", "-k", "drop-double-negations")
    assert "3 passed" in ran


@pytest.mark.sweep
def test_a_kind_of_recorded_step(copy):
    every, condition, method, test = blocks("A kind of recorded step")
    step = "packages/remat/src/remat/session/step.py"
    copy.put(step, "_MOST_BLOCKED = ", every)
    copy.replace(step, "wanted = self.patterns.wanted or is_new\n", condition)
    below = "    @property\n    def is_refused"
    copy.replace(step, below, textwrap.indent(method, "    ") + f"\n{below}")
    copy.append("tests/test_recorded_steps.py", test)
    assert "1 passed" in copy.run("tests/test_recorded_steps.py", "-k", "now_and_then")


def test_the_questions_of_a_recorded_step_are_answered_where_the_table_says():
    text = CHANGES["A kind of recorded step"]
    table = [row.split("|")[2:4] for row in text.splitlines() if row.startswith("| ")]
    found = [
        (method, name)
        for where, example in table
        for method in re.findall(r"`StepState\.(\w+)`", where)
        for name in re.findall(r"`(runs_plain|see_plain)`", example)
    ]
    assert found == [("start", "runs_plain"), ("end", "see_plain")]
    (changed,) = re.findall(r"`StepState\.(\w+)` where `wanted` is set", text)
    for method, name in [*found, (changed, "wanted =")]:
        assert name in inspect.getsource(getattr(StepState, method))
