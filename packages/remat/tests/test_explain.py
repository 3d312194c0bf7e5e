"""What a plan keeps, makes again and why: lifetimes, parts, and the command."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import remat
from remat.command import app
from remat.command.terminal import out
from remat.report.lifetimes import lifetimes
from remat_graph import (
    Compute,
    Free,
    Graph,
    Numerics,
    Op,
    Provenance,
    Schedule,
    Stage,
    Value,
    simulate,
)
from remat_graph.torch import capture
from remat_solvers import solve, store_all

HERE, THERE = Provenance("h.0", "net.py:3"), Provenance("h.1", "net.py:7")


def graph_of_two():
    """a -> b -> c in the forward, from two modules; the backward reads a and b, and peaks last."""
    values = {"a": 100, "b": 40, "c": 10, "g": 10, "gb": 60, "ga": 200}
    ops = (
        Op("A", (), ("a",), 1.0, provenance=HERE),
        Op("B", ("a",), ("b",), 2.0, provenance=HERE),
        Op("C", ("b",), ("c",), 4.0, provenance=THERE),
        Op("loss", ("c",), ("g",), 0.0, stage=Stage.BACKWARD, replayable=False),
        Op("dC", ("g", "b"), ("gb",), 4.0, 500, Stage.BACKWARD, "C", provenance=THERE),
        Op("dB", ("gb", "a"), ("ga",), 2.0, stage=Stage.BACKWARD, twin="B", provenance=HERE),
    )
    sized = tuple(Value(name, size) for name, size in values.items())
    return Graph(sized, ops, results=frozenset(["ga"]), boundary="loss")


LEAN = "A B -a C loss -c dC -g -b A dB -a -gb"


def schedule_of(text):
    words = text.split()
    return Schedule(tuple(Free(w[1:]) if w[0] == "-" else Compute(w) for w in words))


def test_what_is_made_again_and_why():
    told = remat.Plan.of(graph_of_two(), schedule_of(LEAN), 650).explain()
    one, two, loss = told.parts
    assert (one.label, one.source, one.operations) == ("h.0", "net.py:3", 3)
    assert (one.kept_bytes, one.recomputed_bytes, one.peak_bytes) == (40, 100, 40)
    assert (one.recomputations, one.most_runs, one.recompute_time, one.time) == (1, 2, 1.0, 5.0)
    assert (two.label, two.kept_bytes, two.recomputed_bytes) == ("h.1", 10, 0)
    assert (loss.label, loss.kept_bytes) == ("loss", 0)
    assert str(told.peak) == "dC (backward; h.1, net.py:7)"
    assert told.peak.held_bytes == 610
    assert (one.over_bytes, one.binding) == (60, told.peak)
    assert one.why.startswith("made again: keeping it would be 0.0 MiB over the budget at the peak")
    assert one.why.endswith("kept: saves 2,000.00 ms or more")


def test_what_could_have_been_kept():
    told = remat.Plan.of(graph_of_two(), schedule_of(LEAN), 710).explain()
    assert told.parts[0].over_bytes == 0
    assert told.parts[0].why.startswith("made again for others")


def test_parts_are_put_together():
    plan = remat.Plan.of(graph_of_two(), schedule_of(LEAN), 650)
    (whole, _) = plan.explain(by="module", depth=1).parts
    assert (whole.label, whole.source, whole.operations, whole.kept_bytes) == ("h", "", 5, 50)
    with pytest.raises(remat.RematError, match="'line' or 'module'"):
        plan.explain(by="file")


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_what_is_held_adds_up_to_what_the_simulator_says(share):
    layers = (m for _ in range(3) for m in (torch.nn.Linear(32, 32), torch.nn.ReLU()))
    net = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1))
    captured = capture(net, (torch.ones(512, 32),), costs="estimate")
    graph = captured.with_alternatives(Numerics.LOSSY).graph
    assert any(op.overwrites for op in graph.ops)
    budget = int(share * simulate(graph, store_all(graph)).peak_bytes)
    found = solve(graph, budget, limit_seconds=0.5).schedule
    timeline, lives = simulate(graph, found), lifetimes(graph, found)
    for step, what in enumerate(found):
        held = sum(life.size_bytes for life in lives if life.start <= step < life.end)
        if isinstance(what, Compute):
            held += graph.ops[graph.op_index[what.op]].workspace_bytes
        assert held == timeline.during_bytes[step]
    parts = remat.Plan.of(graph, found, budget).explain().parts
    assert sum(part.peak_bytes for part in parts) == timeline.peak_bytes
    total = sum(part.time + part.recompute_time for part in parts)
    assert total == pytest.approx(timeline.time)


def test_what_is_packed_and_made_another_way_is_told():
    graph = graph_of_two()
    pack = Op("pack", ("b",), ("p",), 0.5, optional=True, provenance=HERE)
    other = replace(graph.ops[4], name="dC2", inputs=("g", "p"), alternative_of="dC")
    ops = (*graph.ops[:2], pack, *graph.ops[2:5], other, *graph.ops[5:])
    packed = replace(graph, values=(*graph.values, Value("p", 5)), ops=ops)
    steps = schedule_of("A B pack C -b loss -c dC2 -g -p dB -a -gb")
    one, two, _ = remat.Plan.of(packed, steps, 1000).explain().parts
    assert (one.kept_bytes, one.packed_bytes, one.other_ways) == (105, 5, 0)
    assert one.why == "kept: saves 1,500.00 ms or more; packed: kept in fewer bytes"
    assert (two.other_ways, two.recomputations) == (1, 0)


def run(*words):
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "120"})
    return result.exit_code, result.stdout, result.exception


def test_the_command_takes_a_plan(tmp_path):
    file = tmp_path / "plan.json"
    remat.Plan.of(graph_of_two(), schedule_of(LEAN), 650).save(file)
    code, text, _ = run("explain", file, "--by", "line")
    assert code == 0
    assert "h.0" in text
    assert "net.py:3" in text
    told = json.loads(run("explain", file, "--sort", "kept", "--rows", "1", "--json")[1])
    assert [part["label"] for part in told["parts"]] == ["h.0"]
    assert told["peak"]["op"] == "dC"
    assert "leave out --budget" in str(run("explain", file, "--budget", "1MiB")[2])
    graph = graph_of_two()
    named = replace(graph.ops[4], provenance=Provenance("h.\x1b[31m", "net.py:3"))
    strange = replace(graph, ops=(*graph.ops[:4], named, *graph.ops[5:]))
    remat.Plan.of(strange, schedule_of(LEAN), 650).save(file)
    assert "\x1b" not in run("explain", file)[1]
    assert "--budget is needed" in str(run("explain", "gpt2")[2])


def test_a_narrow_terminal_shows_every_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(out, "_width", 40)  # COLUMNS is read once, when it is made
    graph = graph_of_two()
    values = tuple(replace(value, size_bytes=value.size_bytes * 2**24) for value in graph.values)
    file = tmp_path / "plan.json"
    remat.Plan.of(replace(graph, values=values), schedule_of(LEAN), 2**40).save(file)
    result = CliRunner().invoke(app, ["explain", str(file), "--by", "line"])
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 40
    assert any(line.split()[:2] == ["640.00", "1,600.00"] for line in lines)
    assert "…" not in result.stdout
