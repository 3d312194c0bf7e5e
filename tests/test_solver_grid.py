"""The comparison of solvers: cells in processes of their own, resumed runs, and its claims."""

import argparse
import contextlib

import pytest

import solvers
from remat_graph import Graph, Op, Stage, Value, save, simulate
from remat_partition import partition
from remat_solvers import store_all


@pytest.fixture
def graph():
    values = [Value("x", 10)] + [Value(n, 10) for n in ("f0", "f1", "f2", "b2", "b1", "b0")]
    ops = [Op(f"f{i}", ("x" if i == 0 else f"f{i - 1}",), (f"f{i}",), 1.0) for i in range(3)]
    ops += [
        Op(f"b{i}", (f"f{i}", *([f"b{i + 1}"] if i < 2 else [])), (f"b{i}",), 2.0,
           stage=Stage.BACKWARD, twin=f"f{i}")
        for i in (2, 1, 0)
    ]  # fmt: skip
    return Graph(tuple(values), tuple(ops), frozenset({"x"}), frozenset({"b0"}), "b2")


def cell(solver, outcome, overhead=None, *, budget=0.5, limit=60.0, **more):
    row = {"model": "fno-1d", "budget": budget, "solver": solver, "outcome": outcome}
    row |= {"seconds": 1.0, "limit": limit, "graph": "a"} | more
    return row if overhead is None else row | {"overhead_percent": overhead, "peak_share": budget}


def table(*rows):
    return {(row["model"], row["budget"], row["solver"]): row for row in rows}


@pytest.mark.sweep
def test_cells_are_solved_apart_and_say_how_they_went(graph, tmp_path):
    path = tmp_path / "graph.hierarchy.json"
    save(partition(graph), path)
    whole = simulate(graph, store_all(graph)).peak_bytes

    def task(solver, share):
        key = "fno-1d", share, solver
        return solvers.Task(key, path, graph.time, whole, 60.0, 8 << 30)

    tasks = [task("store-all", 1.0), task("auto", 0.2), task("rotor", 0.9), task("none", 0.9)]
    results = {t.key[2]: result for t, result in solvers.run_apart(tasks, 2)}
    stored = results["store-all"]
    assert stored["outcome"] == "optimal"
    assert (stored["overhead_percent"], stored["bound_percent"]) == (0.0, 0.0)
    assert stored["peak_share"] == 1.0
    assert results["auto"]["outcome"] == "infeasible"
    assert "overhead_percent" not in results["auto"]
    assert results["rotor"]["outcome"] == "feasible"
    assert 0 < results["rotor"]["overhead_percent"] < 100
    assert results["rotor"]["peak_share"] <= 0.9
    assert results["none"]["outcome"] == "broken"
    assert "no solver is called 'none'" in results["none"]["message"]


def test_a_second_run_does_what_is_missing(graph, tmp_path, monkeypatch):
    asked, model = [], {"graph": "a", "time_s": 1.0, "store_all_bytes": 100}

    def run(tasks, jobs):
        for task in tasks:
            asked.append(task.key)
            yield task, {"outcome": "limit", "seconds": 1.0}

    monkeypatch.setattr(solvers, "prepare", lambda name, known: (tmp_path, dict(model)))
    monkeypatch.setattr(solvers, "run_apart", run)
    options = argparse.Namespace(
        json=tmp_path / "solvers.json", models=["fno-1d"], solvers=["refine", "auto"],
        budgets=[0.8, 0.5], limit=60.0, jobs=1, memory=8.0, again=False,
    )  # fmt: skip

    def fill(**changes):
        asked.clear()
        for name, value in changes.items():
            setattr(options, name, value)
        with contextlib.suppress(KeyboardInterrupt):
            solvers.fill(options, *solvers.read(options.json))
        return len(asked)

    assert fill(budgets=[0.8]) == 2
    assert asked == [("fno-1d", 0.8, "refine"), ("fno-1d", 0.8, "auto")]
    assert fill() == 0
    assert fill(budgets=[0.8, 0.5]) == 2
    assert {key[1] for key in asked} == {0.5}
    assert fill(limit=30.0) == 4
    assert fill(solvers=["auto"], again=True) == 2
    assert fill(again=False) == 0
    model["graph"] = "b"
    assert fill() == 2
    assert {key[2] for key in solvers.read(options.json)[1]} == {"auto"}


def test_ours_are_compared_with_the_best_of_the_others_at_the_same_limit(capsys):
    better = cell("rotor", "feasible", 3.0)
    assert not solvers.print_standing(table(cell("refine", "feasible", 3.05), better))
    missed = solvers.print_standing(table(cell("refine", "feasible", 3.2), better))
    assert missed == ["refine on fno-1d at 0.5"]
    assert "+0.20" in capsys.readouterr().out
    assert solvers.print_standing(table(cell("auto", "limit"), better)) == ["auto on fno-1d at 0.5"]
    other = cell("refine", "feasible", 9.0, limit=5.0)
    assert not solvers.print_standing(table(other, better))


def test_the_hierarchy_may_cost_little_where_the_flat_program_finishes():
    flat, open_flat = (cell("rk-checkmate", end, 5.0) for end in ("optimal", "feasible"))
    near, far = (cell("h-ilp", "feasible", overhead) for overhead in (5.5, 5.7))
    assert not solvers.print_hierarchical(table(flat, near))
    assert not solvers.print_hierarchical(table(open_flat, far))
    for missed in (far, cell("h-ilp", "limit")):
        assert solvers.print_hierarchical(table(flat, missed)) == ["h-ilp on fno-1d at 0.5"]


def test_rounding_is_held_to_a_known_optimum_alone(capsys):
    proved = cell("refine", "optimal", 10.0, bound_percent=10.0)
    rounded = cell("checkmate-rounding", "feasible", 17.0)
    assert solvers.print_rounding(table(proved, rounded)) == ["checkmate-rounding on fno-1d at 0.5"]
    assert "1.064" in capsys.readouterr().out
    open_one = cell("refine", "feasible", 16.0, bound_percent=10.0)
    assert not solvers.print_rounding(table(open_one, rounded))
    assert "<= 1.064" in capsys.readouterr().out
    assert not solvers.print_rounding(table(proved, cell("checkmate-rounding", "unsuitable")))
