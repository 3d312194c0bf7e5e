"""What one construction of a model has measured and solved, the next does not do again."""

import functools
import json
import logging
import os

import pytest
import torch
from torch import nn

import remat
import remat_graph.torch.cost.costs as op_costs
from remat.cache import Entry, Store, cached_solution, keep_solution, store
from remat.cache.keys import costs_key
from remat.planning import planner, solving
from remat_graph import Graph, Op, Solution, Stage, Status, Value
from remat_solvers import solve

WIDTH = 64
BATCH = torch.randn(128, WIDTH)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "v1"


@pytest.fixture
def work(monkeypatch):
    """What is measured and solved from now on."""
    done = []

    def noted(module, name):
        function = getattr(module, name)

        def note(*args, **kwargs):
            done.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, note)

    noted(op_costs, "_measure")
    noted(planner, "measure_plain")
    noted(planner, "rehearsed")
    noted(solving, "solve")
    return done


def rematerialized(budget=0.6):
    model = remat.rematerialize(mlp(), BATCH, budget=budget, limit_seconds=0.2)
    return model.plan


def test_a_second_construction_measures_and_solves_nothing(folder, work):
    first = rematerialized()
    assert {*work} == {"_measure", "measure_plain", "solve", "rehearsed"}
    work.clear()
    second = rematerialized()
    assert not work
    assert second.recomputations > 0
    assert second.schedule == first.schedule
    assert second.graph == first.graph
    assert second.solution.lower_bound == first.solution.lower_bound
    assert (second.budget_bytes, second.source) == (first.budget_bytes, first.source)
    assert second.measured_peak_bytes == first.measured_peak_bytes <= first.budget_bytes
    assert second.measured_curve == first.measured_curve != ()
    kinds = sorted(entry.kind for entry in Store.here().entries())
    assert kinds == ["costs", "peaks", "peaks", "solutions"]


@pytest.mark.sweep
def test_another_budget_is_solved_for_with_the_same_costs(folder, work):
    first = rematerialized()
    work.clear()
    second = rematerialized("2MiB")
    assert work == ["solve", "rehearsed"]
    assert second.graph == first.graph


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text[: len(text) // 2], marks=pytest.mark.sweep),
        lambda text: "\xff",
        pytest.param(
            lambda text: text.replace('"key":{', '"key":{"more":"words",'), marks=pytest.mark.sweep
        ),
        pytest.param(
            lambda text: text.replace('"version":1', '"version":2'), marks=pytest.mark.sweep
        ),
    ],
)
def test_damaged_and_foreign_entries_are_named_and_left_out(folder, work, caplog, damage):
    first = rematerialized()
    # Peaks come before solutions: a search by time may solve anew for another schedule.
    again = {
        "peaks": {"measure_plain", "rehearsed"},
        "solutions": {"solve"},
        "costs": {"_measure"},
    }
    for kind, done in again.items():
        entries = [entry for entry in Store.here().entries() if entry.kind == kind]
        for entry in entries:
            entry.path.write_text(damage(entry.path.read_text()), encoding="latin-1")
        work.clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "remat"):
            second = rematerialized()
        assert {*work} >= done
        assert ("_measure" in work) == (kind == "costs")
        assert second.budget_bytes == first.budget_bytes
        for entry in entries:
            assert str(entry.path) in caplog.text


def chain():
    """Four layers and their backward half."""
    ops = [Op(f"f{i}", (f"a{i - 1}" if i else "x",), (f"a{i}",), 1.0) for i in range(4)]
    for i in reversed(range(4)):
        read = dict.fromkeys([f"a{i}", f"g{i + 1}" if i < 3 else "a3"])
        ops.append(Op(f"b{i}", tuple(read), (f"g{i}",), 2.0, stage=Stage.BACKWARD))
    names = ["x", *(v for op in ops for v in op.outputs)]
    values = tuple(Value(name, 10) for name in names)
    return Graph(values, tuple(ops), frozenset({"x"}), frozenset({"g0"}), "b3")


GRAPH = chain()


def test_a_solution_for_a_larger_budget_serves_where_it_fits(folder):
    solution = solve(GRAPH, 45)
    keep_solution(GRAPH, 45, "auto", None, solution)
    assert cached_solution(GRAPH, 45, "auto", None).schedule == solution.schedule
    assert cached_solution(GRAPH, solution.peak_bytes, "auto", None).lower_bound is not None
    assert cached_solution(GRAPH, solution.peak_bytes - 1, "auto", None) is None
    assert cached_solution(GRAPH, 46, "auto", None) is None  # a faster one might fit
    assert cached_solution(GRAPH, 45, "auto", 1.0) is None
    assert cached_solution(GRAPH, 45, "refine", None) is None


def test_a_solution_for_a_smaller_budget_serves_where_nothing_can_be_much_faster(folder):
    everything = solve(GRAPH, 1000)
    keep_solution(GRAPH, 80, "auto", None, everything)
    found = cached_solution(GRAPH, 90, "auto", None)
    assert (found.schedule, found.status) == (everything.schedule, Status.OPTIMAL)
    assert found.solver.endswith(" for 80 bytes")
    keep_solution(GRAPH, 45, "refine", None, solve(GRAPH, 45))  # which computes again
    assert cached_solution(GRAPH, 46, "refine", None) is None


@pytest.mark.parametrize("name", ["o99", "f0", "o-1", "o0; import os", "o" + "9" * 30])
def test_a_cached_schedule_of_other_names_is_refused(folder, caplog, name):
    keep_solution(GRAPH, 60, "auto", None, solve(GRAPH, 60))
    (entry,) = Store.here().entries()
    document = json.loads(entry.path.read_text())
    document["body"]["body"]["schedule"]["steps"][0] = ["compute", name]
    entry.path.write_text(json.dumps(document))
    assert cached_solution(GRAPH, 60, "auto", None) is None
    assert str(entry.path) in caplog.text


def test_a_bound_above_the_time_is_refused(folder, caplog):
    solution = solve(GRAPH, 60)
    lies = Solution(Status.OPTIMAL, solution.schedule, 99.0, 1, 99.0, "x", 0.0)
    keep_solution(GRAPH, 60, "auto", None, lies)
    assert cached_solution(GRAPH, 60, "auto", None) is None
    assert "bound" in caplog.text


def test_the_oldest_give_way(folder, monkeypatch):
    for index, size in enumerate((60, 61, 62)):
        keep_solution(GRAPH, size, "auto", None, solve(GRAPH, size))
        newest = Store.here().entries()[0]
        os.utime(newest.path, (index, index))
    monkeypatch.setattr(store, "_MOST_BYTES", 2 * newest.size_bytes + 10)
    keep_solution(GRAPH, 63, "auto", None, solve(GRAPH, 63))
    left = sorted(entry.path.name for entry in Store.here().entries())
    assert left == ["62.json", "63.json"]


def test_clearing_leaves_what_is_not_of_the_cache(folder):
    keep_solution(GRAPH, 60, "auto", None, solve(GRAPH, 60))
    (folder / "notes.txt").write_text("mine")
    (entry,) = Store.here().clear()
    assert isinstance(entry, Entry)
    assert [path.name for path in folder.rglob("*")] == ["notes.txt"]


@pytest.mark.parametrize("word", ["0", "off", ""])
def test_the_cache_can_be_switched_off(monkeypatch, word):
    monkeypatch.setenv("REMAT_CACHE", word)
    assert Store.here() is None


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "file" / "cache"))
    assert rematerialized().recomputations > 0
    assert "REMAT_CACHE names another folder" in caplog.text


@pytest.mark.sweep
def test_a_folder_of_shared_plans(tmp_path, monkeypatch, work, caplog):
    first = rematerialized()
    first.save(tmp_path / "any name; $(x).json")
    (tmp_path / "broken.json").write_text('{"kind":"plan"')
    monkeypatch.setenv("REMAT_PLANS", os.pathsep.join([str(tmp_path / "none"), str(tmp_path)]))
    work.clear()
    shared = rematerialized(budget=first.budget_bytes)
    assert "solve" not in work
    assert shared.recomputations == first.recomputations
    assert "broken.json" in caplog.text
    assert "none, which is no folder" in caplog.text
    rematerialized(budget=first.budget_bytes + 1)
    assert "solve" in work


def test_a_shared_plan_that_lies_about_its_graph_is_left_out(tmp_path, monkeypatch, work, caplog):
    first = rematerialized()
    first.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    document["body"]["kinds"][0]["options"][0]["schedule"]["body"]["steps"].pop(0)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    monkeypatch.setenv("REMAT_PLANS", str(tmp_path))
    work.clear()
    rematerialized(budget=first.budget_bytes)
    assert "solve" in work
    assert "plan.json" in caplog.text


def test_a_cache_that_cannot_be_read_or_found_is_left_out(folder, monkeypatch, caplog):
    keep_solution(GRAPH, 45, "auto", None, solve(GRAPH, 45))
    monkeypatch.setattr("pathlib.Path.glob", denied)
    assert cached_solution(GRAPH, 45, "auto", None) is None
    assert "the cache cannot be read" in caplog.text
    monkeypatch.setenv("REMAT_CACHE", "~nobody of this name/cache")
    assert Store.here().folder.parts[0].startswith("~")


def denied(*_):
    raise PermissionError(13, "denied")


@pytest.mark.parametrize("backend", ["cuda.matmul", "cudnn.conv"])
def test_times_are_those_of_a_precision_that_was_set_by_the_newer_interface(backend):
    """Torch refuses to say it by the older one then."""
    of_backend = functools.reduce(getattr, backend.split("."), torch.backends)
    plain, before = costs_key(torch.device("cpu")), of_backend.fp32_precision
    try:
        of_backend.fp32_precision = "ieee" if before == "tf32" else "tf32"
        assert costs_key(torch.device("cpu")) != plain
    finally:
        of_backend.fp32_precision = before
    assert costs_key(torch.device("cpu")) == plain
