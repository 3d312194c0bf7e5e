"""Graphs with the same outline run each other's schedules."""

import json
from dataclasses import replace

import pytest

import remat
from remat.plans.outlines import Outline
from remat_graph import Compute, DocumentError, Free, Graph, Op, Schedule, Stage, Value, simulate


def step(*gradients):
    """Make a step of two outputs: their gradients come in this order, that of `b` is read first."""
    sizes = {"x": 512, "a": 2048, "b": 4096, "da": 2048, "db": 4096, "dc": 1024, "dx": 512}
    ops = (
        Op("f", ("x",), ("a",), 1.0),
        Op("g", ("a",), ("b",), 1.0),
        Op("loss", ("a", "b"), gradients, 0.0, stage=Stage.BACKWARD, replayable=False),
        Op("of_b", ("db",), ("dc",), 1.0, stage=Stage.BACKWARD),
        Op("of_a", ("dc", "da"), ("dx",), 1.0, stage=Stage.BACKWARD),
    )
    values = tuple(Value(name, size) for name, size in sizes.items())
    return Graph(values, ops, resident={"x"}, results={"dx"}, boundary="loss")


def stored():
    steps = ["f", "g", "loss", "-a", "-b", "of_b", "-db", "of_a"]
    return Schedule(tuple(Free(s[1:]) if s[0] == "-" else Compute(s) for s in steps))


def test_the_order_of_outputs_does_not_count():
    here, there = step("da", "db"), step("db", "da")
    mine, its = Outline.of(here), Outline.of(there)
    assert mine.hash == its.hash
    schedule = stored()
    assert mine.translate(schedule, its) == schedule  # the names are the same in both
    assert simulate(there, schedule).peak_bytes == simulate(here, schedule).peak_bytes


def test_which_gradient_is_read_when_counts():
    here = step("da", "db")
    other = {"da": "db", "db": "da"}
    ops = tuple(
        op if op.name == "loss" else replace(op, inputs=tuple(other.get(v, v) for v in op.inputs))
        for op in here.ops
    )
    assert Outline.of(replace(here, ops=ops)).hash != Outline.of(here).hash


def test_files_of_schema_version_3_have_outlines_in_the_order_of_outputs():
    graph = step("da", "db")
    plan = remat.Plan.of(graph, stored(), 2**20)
    document = json.loads(plan.encode())
    region = document["body"]["kinds"][0]
    before = Outline.of(graph, as_made=True).hash
    assert region["outline"] == Outline.of(graph).hash != before
    region["outline"] = before
    assert remat.Plan.decode(json.dumps(document | {"version": 3}).encode()) == plan
    region["outline"] = before[::-1]
    with pytest.raises(DocumentError, match="hash of the outline"):
        remat.Plan.decode(json.dumps(document).encode())
