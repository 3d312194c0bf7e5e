"""Traces for other tools: what Chrome's format and torch's memory viewer read."""

import json
import pickle
import pickletools

import pytest
import torch
from torch.cuda import _memory_viz
from typer.testing import CliRunner

import remat
from remat.command import app
from remat_graph import Compute, simulate

# What the viewer's own reader of pickles knows.
OPCODES = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT",
    "BINUNICODE", "DICT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1",
    "LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO",
    "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


@pytest.fixture(scope="module")
def plan():
    layers = (m for _ in range(4) for m in (torch.nn.Linear(32, 32), torch.nn.GELU()))
    net = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1))
    found = remat.plan(net, torch.ones(512, 32), budget=0.7, costs="estimate")
    assert found.recomputations
    return found


def test_chrome_is_told_what_runs_and_what_is_held(plan, tmp_path):
    plan.save_trace(tmp_path / "step.json")
    document = json.loads((tmp_path / "step.json").read_text())
    events = document["traceEvents"]
    ran = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in ran] == [s.op for s in plan.schedule if isinstance(s, Compute)]
    assert sum(e["dur"] for e in ran) / 1e6 == pytest.approx(plan.solution.time)
    assert sum(e["cat"] == "again" for e in ran) == plan.recomputations
    assert {e["args"]["module"] for e in ran} > {"0", "1"}
    held = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(held) == simulate(plan.graph, plan.schedule).peak_bytes
    assert document["otherData"]["budget_bytes"] == plan.budget_bytes


def test_the_memory_viewer_reads_what_is_allocated(plan, tmp_path):
    plan.save_trace(tmp_path / "step.pickle")
    data = (tmp_path / "step.pickle").read_bytes()
    assert {opcode.name for opcode, *_ in pickletools.genops(data)} <= OPCODES
    snapshot = pickle.loads(data)
    held, most, alive = 0, 0, {}
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in alive
            alive[event["addr"]] = event["size"]
            held += event["size"]
            assert event["frames"][0]["name"]
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"]) == event["size"]
            held -= event["size"]
        most = max(most, held)
    assert most == simulate(plan.graph, plan.schedule).peak_bytes
    (segment,) = snapshot["segments"]
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    at_end = {b["address"]: b["size"] for b in segment["blocks"] if b["state"] != "inactive"}
    assert at_end == alive
    assert "allocated" in _memory_viz.segsum(snapshot)
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)


@pytest.fixture(scope="module")
def measured():
    layers = (m for _ in range(4) for m in (torch.nn.Linear(32, 32), torch.nn.GELU()))
    net = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1))
    return remat.rematerialize(net, torch.ones(512, 32), budget=0.7, costs="estimate").plan


def test_what_a_real_run_held_stands_beside_what_is_predicted(measured, tmp_path):
    assert max(held for _, held in measured.measured_curve) == measured.measured_peak_bytes
    measured.save_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    counters = {e["pid"]: e["name"] for e in events if e["ph"] == "C"}
    assert counters == {1: "held", 2: "held, measured"}
    held = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 2]
    assert max(held) == measured.measured_peak_bytes


def test_torch_reads_what_a_real_run_held(measured, tmp_path):
    measured.save_trace(tmp_path / "step.pickle")
    data = (tmp_path / "step.pickle").read_bytes()
    assert {opcode.name for opcode, *_ in pickletools.genops(data)} <= OPCODES
    snapshot = pickle.loads(data)
    peaks, at_end = [], []
    for trace in snapshot["device_traces"]:
        now = most = 0
        for event in trace:
            now += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
            most = max(most, now)
        peaks.append(most)
        at_end.append(now)
    predicted = simulate(measured.graph, measured.schedule).peak_bytes
    assert peaks[0] == predicted
    assert peaks[1] == pytest.approx(measured.measured_peak_bytes, rel=0.01)
    assert [segment["allocated_size"] for segment in snapshot["segments"]] == at_end
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    assert _memory_viz.trace_plot(snapshot)
    assert _memory_viz.segment_plot(snapshot)
    assert "free completed" in _memory_viz.trace(snapshot)
    assert "allocated" in _memory_viz.segsum(snapshot)


def test_the_command_writes_the_same_traces(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    for ending in ("json", "pickle"):
        plan.save_trace(tmp_path / f"step.{ending}")
        written = tmp_path / f"by the command.{ending}"
        words = ["trace", str(tmp_path / "plan.json"), "-o", str(written), "--json"]
        told = CliRunner().invoke(app, words)
        assert json.loads(told.stdout) == {"written": str(written)}
        assert written.read_bytes() == (tmp_path / f"step.{ending}").read_bytes()


def test_other_endings_are_refused(plan, tmp_path):
    with pytest.raises(remat.RematError, match=r"\.json, for Perfetto"):
        plan.save_trace(tmp_path / "step.html")


def test_a_notebook_shows_a_small_picture_of_it(plan):
    shown = plan._repr_html_()
    assert shown.count("<polyline") == 2
    assert f"{plan.recomputations} recomputed" in shown
    assert "budget, " in shown
    assert len(shown) < 20_000
