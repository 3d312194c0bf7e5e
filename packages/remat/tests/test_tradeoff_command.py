"""`remat tradeoff`: the table, the files, and what is said when they cannot be made."""

import dataclasses
import json
import sys

import pytest
from typer.testing import CliRunner

import remat
from remat.command import app, main
from remat.command.terminal import out
from remat_graph import Graph, Op, Schedule, Stage, Value, decode, save, simulate
from remat_solvers import BackEndFailed
from remat_solvers.queries import tradeoff as tradeoff_module

DEPTH = 5


def chain():
    """Layers, and their backward half, which reads every activation."""
    values, ops = [Value("x", 10)], []
    for i in range(DEPTH):
        values.append(Value(f"a{i}", 10))
        ops.append(Op(f"f{i}", (f"a{i - 1}" if i else "x",), (f"a{i}",), 1.0))
    before = f"a{DEPTH - 1}"
    for i in reversed(range(DEPTH)):
        values.append(Value(f"g{i}", 10))
        read = tuple(dict.fromkeys([f"a{i}", before]))
        ops.append(Op(f"b{i}", read, (f"g{i}",), 2.0, stage=Stage.BACKWARD))
        before = f"g{i}"
    return Graph(tuple(values), tuple(ops), frozenset({"x"}), frozenset({before}), f"b{DEPTH - 1}")


GRAPH = chain()


@pytest.fixture
def path(tmp_path):
    save(GRAPH, tmp_path / "graph.json")
    return tmp_path / "graph.json"


def run(*words):
    return CliRunner().invoke(app, ["tradeoff", *map(str, words)], env={"COLUMNS": "120"})


def refused(capsys, monkeypatch, *words, code=1):
    """Run as a user does; give what is said of the error."""
    monkeypatch.setattr(sys, "argv", ["remat", "tradeoff", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    return " ".join(capsys.readouterr().err.split())


def test_the_table_and_the_files(path, tmp_path):
    written, picture = tmp_path / "curve.json", tmp_path / "curve.svg"
    result = run(path, "--points", 3, "--save", written, "--plot", picture)
    assert result.exit_code == 0, result.output
    curve = remat.tradeoff(GRAPH, points=3)
    rows = [line for line in result.output.splitlines() if "optimal" in line]
    assert len(rows) == len(curve.points) == 3
    for row, point in zip(rows, curve.points, strict=True):
        assert f" {point.budget_bytes} " in row
        assert f"{100 * curve.overhead(point.solution.time):.2f}" in row
    document = json.loads(written.read_text())
    assert (document["kind"], document["version"]) == ("tradeoff", 1)
    for point, told in zip(curve.points, document["body"]["points"], strict=True):
        assert told["budget_bytes"] == point.budget_bytes
        body = {"kind": "solution", "version": 1, "body": told["solution"]}
        solution = decode(json.dumps(body).encode())
        assert isinstance(solution.schedule, Schedule)
        assert simulate(GRAPH, solution.schedule).time == point.solution.time == solution.time
    assert picture.read_text().startswith("<?xml")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curve.json", "curve.svg", "graph.json"]


def test_a_narrow_terminal_shows_every_figure(path, monkeypatch):
    monkeypatch.setattr(out, "_width", 40)
    told = run(path, "--budget", "100%").stdout
    assert "optimal" in told
    assert "…" not in told


def test_ctrl_c_keeps_what_was_found(path, monkeypatch):
    asked, search = [], tradeoff_module.search

    def interrupted(*arguments):
        asked.append(arguments)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return search(*arguments)

    monkeypatch.setattr(tradeoff_module, "search", interrupted)
    words = [word for share in (55, 65, 75, 85) for word in ("--budget", f"{share}%")]
    points = json.loads(run(path, *words, "--json").stdout)["body"]["points"]
    assert len(asked) == 2
    assert [point["seconds"] > 0 for point in points] == [False, False, False, True]


def test_a_budget_at_which_the_solver_failed_is_named_beside_the_others(path, monkeypatch):
    search = tradeoff_module.search

    def failing(problem, *arguments):
        if problem.budget_bytes == 45:
            raise BackEndFailed("HIGHS", 7, RuntimeError("no memory"))
        return dataclasses.replace(search(problem, *arguments), doubt="HIGHS was wrong")

    monkeypatch.setattr(tradeoff_module, "search", failing)
    words = ["--budget", "45B", "--budget", "55B", "--budget", "100%"]
    told = " ".join(run(path, *words).stdout.split())
    assert "failed at 45 bytes: back end 'HIGHS' failed" in told
    assert "not certified: HIGHS was wrong" in told
    first, second, _ = json.loads(run(path, *words, "--json").stdout)["body"]["points"]
    assert "no memory" in first["error"]
    assert second["error"] is None


def test_budgets_that_fit_nothing_are_shown(path, tmp_path):
    saved = tmp_path / "curve.json"
    result = run(path, "--budget", "1B", "--budget", "100%", "--save", saved)
    assert result.exit_code == 0, result.output
    assert "infeasible" in result.output
    first, last = json.loads(saved.read_text())["body"]["points"]
    assert (first["proved_infeasible"], first["solution"], first["lower_bound"]) == (
        True, None, None,
    )  # fmt: skip
    assert last["status"] == "optimal"


def test_what_cannot_be_written_is_said_before_work(path, tmp_path, capsys, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("work was done")

    monkeypatch.setattr("remat.planning.tradeoffs.tradeoff", never)
    nowhere = tmp_path / "nowhere"
    for option, file, message in [
        ("--save", nowhere / "c.json", "does not exist"),
        ("--plot", nowhere / "c.png", "does not exist"),
        ("--plot", tmp_path / "c.txt", ".png"),
        ("--plot", tmp_path / "c", ".png"),
    ]:
        assert message in refused(capsys, monkeypatch, path, option, file)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    said = refused(capsys, monkeypatch, path, "--plot", tmp_path / "c.png")
    assert "pip install 'remat[plot]'" in said


def test_bad_numbers_are_one_line(path, capsys, monkeypatch):
    assert "points=1" in refused(capsys, monkeypatch, path, "--points", 1)
    assert "-5%" in refused(capsys, monkeypatch, path, "--budget=-5%")
    assert "'auto'" in refused(capsys, monkeypatch, path, "--budget", "auto")
    limit = refused(capsys, monkeypatch, path, "--limit-seconds=-1", code=2)
    assert "'--limit-seconds'" in limit


def test_bad_numbers_are_said_before_the_graph_is_read(path, capsys, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("the graph was read")

    monkeypatch.setattr("remat.command.curves.load_graph", never)
    for words, message in [
        (("--points", 1), "points=1"),
        (("--budget", "nothing"), "budget='nothing'"),
        (("--solver", "refined"), "no solver is called 'refined'"),
    ]:
        assert message in refused(capsys, monkeypatch, path, *words)


@pytest.mark.parametrize(
    "ending",
    [
        "png",
        pytest.param("svg", marks=pytest.mark.sweep),
        pytest.param("pdf", marks=pytest.mark.sweep),
    ],
)
def test_pictures_of_every_kind_of_curve(tmp_path, ending):
    one = Graph((Value("a", 3),), (Op("f", (), ("a",), 0.0),), frozenset(), frozenset({"a"}))
    for number, curve in enumerate(
        [remat.tradeoff(GRAPH, points=2), remat.tradeoff(GRAPH, budgets=[1]), remat.tradeoff(one)]
    ):
        file = tmp_path / f"{number}.{ending}"
        remat.plot_tradeoff(curve, file)
        assert file.stat().st_size > 1000


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    curve = remat.tradeoff(GRAPH, budgets=[1.0])
    file = tmp_path / "curve.json"
    file.write_text("old")

    def full(descriptor):
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        remat.save_tradeoff(curve, file)
    assert [p.name for p in tmp_path.iterdir()] == ["curve.json"]
    assert file.read_text() == "old"
