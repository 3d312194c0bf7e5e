"""How the command starts and stops: nothing slow is imported without need, Ctrl-C is quiet."""

import json
import os
import signal
import subprocess
import sys

import pytest

import remat
from remat.command.targets import Device
from remat_graph import Graph, Op, Stage, Value, save

STARTED = """
import json, sys
from remat.__main__ import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["remat", *words]
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    slow = {"torch", "cvxpy", "transformers", "plotly", "matplotlib"}
    print("\\ncode", code, "imported", sorted(slow & {*sys.modules}))
"""


TWICE = """
import torch, remat
model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
try:
    remat.plan(model, (x,), budget="1MiB", costs="estimate")
except KeyboardInterrupt:
    print("stopped")
print(remat.plan(model, (x,), budget="1MiB", costs="estimate").recomputations)
"""


@pytest.fixture
def graph(tmp_path):
    ops = (Op("f", ("x",), ("a",), 1.0), Op("b", ("a",), ("g",), 1.0, stage=Stage.BACKWARD))
    values = tuple(Value(name, 10) for name in ("x", "a", "g"))
    save(Graph(values, ops, frozenset({"x"}), frozenset({"g"}), "b"), tmp_path / "graph.json")
    return tmp_path / "graph.json"


WITHOUT_TORCH = [
    (["--help"], 0),
    (["plan", "--help"], 0),
    (["solvers"], 0),
    (["cache", "list"], 0),
    (["solve", "GRAPH", "--budget", "100%", "--solver", "store-all"], 0),
    (["tradeoff", "GRAPH", "--points", "2"], 0),
    (["solve", "GRAPH", "--budget", "8GiBs"], 1),
    (["solve", "nowhere.json", "--budget", "50%"], 1),
    (["plan", "nowhere.py:net", "--budget", "50%"], 1),
    (["plan", "GRAPH", "--budget", "50%"], 1),
    (["plan", "gpt2", "--budget", "50%", "--solver", "none"], 1),
    (["largest-batch", "gpt2", "--budget", "50%"], 1),
    (["tradeoff", "gpt2", "--points", "1"], 1),
    (["explain", "nowhere.json"], 1),
    (["plan", "gpt2", "--device", "z80"], 2),
]


def test_what_needs_no_torch_imports_none(graph, tmp_path):
    """In one process, one after another: it takes a second to start."""
    given = [[word.replace("GRAPH", str(graph)) for word in words] for words, _ in WITHOUT_TORCH]
    ended = subprocess.run(
        [sys.executable, "-c", STARTED, json.dumps(given)],
        capture_output=True, text=True, check=True,
        env={**os.environ, "REMAT_CACHE": str(tmp_path)},
    )  # fmt: skip
    told = [line for line in ended.stdout.splitlines() if line.startswith("code ")]
    expected = [f"code {code} imported []" for _, code in WITHOUT_TORCH]
    assert told == expected, ended.stderr


@pytest.mark.sweep
def test_every_name_is_there_without_an_import_of_torch_at_first():
    script = (
        "import sys, remat; assert 'torch' not in sys.modules; remat.__version__;"
        "from remat import *; assert all(n in globals() and n in dir(remat) for n in remat.__all__)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="'remat' has no attribute 'rematerialise'"):
        remat.rematerialise  # noqa: B018


def test_the_devices_of_the_command_are_those_there_are():
    assert {*Device} == {*remat.DEVICES}


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    "moment",
    [
        "typer",
        pytest.param("remat_graph", marks=pytest.mark.sweep),
        "remat.planning.cutting",
        "torch",
    ],
)
def test_ctrl_c_during_an_import_is_quiet(tmp_path, moment):
    (tmp_path / "net.py").write_text("import torch, time; time.sleep(60)")  # if it comes late
    words = "plan", "net.py:net", "--budget", "1%"
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "remat", *words],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        for line in process.stderr:
            if line.split("|")[-1].strip().startswith(moment):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.readlines()
    assert process.returncode in (130, -signal.SIGINT)  # a shell calls both 130
    assert not [line for line in rest if not line.startswith("import time:")]


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_after_ctrl_c_in_the_first_plan_another_can_be_made():
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-c", TWICE],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        for line in process.stderr:
            if line.split("|")[-1].strip() == "sympy.core.basic":  # amid an import of torch's
                process.send_signal(signal.SIGINT)
                break
        rest, _ = process.stderr.read(), process.wait()
        assert process.stdout.read().split() == ["stopped", "0"], rest[-2000:]
