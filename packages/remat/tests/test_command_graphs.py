"""The command on saved graphs: solved, checked, and solvers side by side."""

import os
from pathlib import Path

import pytest
from remat_cases.commands import ended, run, run_json

import remat
from remat.command import curves
from remat.command.terminal import check_output
from remat_graph import load
from remat_graph.schedule import Solution, Status
from remat_solvers.core import trust
from remat_solvers.errors import format_bytes


def test_a_saved_graph_is_solved_and_checked(graph, tmp_path):
    out, plan = tmp_path / "s.json", tmp_path / "p.json"
    told = run_json("solve", graph, "--budget", "85%", "--output", out, "--save", plan)
    assert isinstance(load(out), Solution)
    assert remat.Plan.load(plan).solution.peak_bytes == told["peak_bytes"] <= told["budget_bytes"]
    checked = run_json("check", graph, out)
    assert (checked["peak_bytes"], checked["time"]) == (told["peak_bytes"], told["time"])
    assert "no schedule is below" in run("solve", graph, "--budget", "85%")


def test_a_plan_stands_for_its_graph_and_its_schedule(graph):
    plan = graph.with_name("all.json")
    by_graph, by_plan = (run_json("check", named, plan) for named in (graph, plan))
    assert by_graph == by_plan
    assert run_json("solve", plan, "--budget", "100%")["peak_bytes"] == by_plan["peak_bytes"]


def test_what_cannot_be_written_is_refused_before_work(graph, tmp_path, capsys, monkeypatch):
    words = "solve", graph, "--budget", "100%", "--output", tmp_path / "s.json"
    monkeypatch.setattr("remat_solvers.solve", None)
    _, said = ended(capsys, monkeypatch, *words, "--save", tmp_path / "s.json")
    assert "named for two things" in said
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert "nothing can be written" in ended(capsys, monkeypatch, *words)[1]
    check_output(Path(os.devnull), None)


@pytest.mark.sweep
def test_solvers_side_by_side(graph, capsys, monkeypatch):
    words = ("compare", graph, "--solver", "store-all", "--solver", "refine")
    words += ("--limit-seconds", "0.5")
    told = run_json(*words, "--budget", "85%")
    assert [answer["solver"] for answer in told["answers"]] == ["refine", "store-all"]
    assert "error" in told["answers"][1]
    assert "store-all: nothing found within the budget" in run(*words, "--budget", "85%")
    assert "store-all" in run(*words, "--budget", "100%")
    assert ended(capsys, monkeypatch, *words, "--budget", "1B")[0] == 3


@pytest.fixture
def refused_by(monkeypatch):
    """Have a solver say that nothing below a byte more than the budget fits."""
    asked = curves._asked

    def make(name):
        def refusing(graph, size, solver, *rest):
            if solver == name:
                return remat.BudgetTooSmall(size, size + 1, size + 1, None, Status.INFEASIBLE)
            return asked(graph, size, solver, *rest)

        monkeypatch.setattr(curves, "_asked", refusing)
        monkeypatch.setattr(trust, "_doubts", {})

    return make


def test_solvers_side_by_side_are_held_against_one_another(graph, refused_by):
    refused_by("tw-remat")
    words = ("--solver", "tw-remat", "--solver", "store-all", "--budget", "100%")
    first, second = run_json("compare", graph, *words)["answers"]
    assert (first["solver"], second["solver"]) == ("store-all", "tw-remat")
    assert "it claims that nothing fits" in second["error"]
    assert "but a schedule of 'store-all' takes" in second["error"]


def test_what_a_back_end_proved_is_not_told_once_another_solver_refutes_it(graph, refused_by):
    refused_by("refine")
    words = ("--solver", "refine", "--solver", "store-all", "--budget", "100%")
    told = run_json("compare", graph, *words)
    least = format_bytes(told["budget_bytes"] + 1)
    assert f"can go below {least}" not in told["answers"][1]["error"]
    assert trust.doubt_of("HIGHS")
