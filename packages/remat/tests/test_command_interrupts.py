"""Ctrl-C at a command: what was found by then is kept, and said."""

import os
import signal
import sys
import time

import pytest
from remat_cases.commands import ended, run, run_json

import remat
import remat_solvers
from remat.command import main, models
from remat.planning import solving
from remat_graph import load
from remat_solvers.refine import Refine


def test_an_interrupted_search_ends_with_the_best_so_far(graph, monkeypatch, tmp_path):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "cache"))
    loaded = load(graph)
    everything = sum(value.size_bytes for value in loaded.values)

    def stop(progress):
        if progress.incumbent_time is not None:
            raise KeyboardInterrupt

    def solved(**more):
        size = int(0.55 * everything)
        return solving.solution_for(loaded, size, size, "refine", 5.0, stop, **more)

    assert solved(keep_best=True).schedule is not None
    with pytest.raises(KeyboardInterrupt):  # what was cut short is not in the cache
        solved()


def stopping(monkeypatch, module, name, calls):
    """Let a function run so often, then press Ctrl-C."""
    function, left = getattr(module, name), iter(range(calls))

    def run(*args, **kwargs):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGINT)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, run)


@pytest.mark.parametrize(
    ("budget", "code"), [("100%", 0), pytest.param("1KiB", 130, marks=pytest.mark.sweep)]
)
def test_what_is_compared_before_ctrl_c_is_shown(graph, capsys, monkeypatch, budget, code):
    stopping(monkeypatch, remat_solvers, "solve", 1)
    words = ["compare", graph, "--solver", "refine", "--solver", "monet", "--budget", budget]
    monkeypatch.setattr(sys, "argv", ["remat", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code or 0) == code
    said = capsys.readouterr().out
    assert "refine" in said
    assert "monet" not in said


def test_ctrl_c_keeps_the_best_of_the_solver_that_is_compared(graph, monkeypatch):
    solve = Refine.solve

    def pressed(self, problem, limit, report):
        solve(self, problem, limit, report)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    monkeypatch.setattr(Refine, "solve", pressed)
    words = "--solver", "refine", "--solver", "monet", "--budget", "100%"
    told = run_json("compare", graph, *words)
    assert [(answer["solver"], "error" in answer) for answer in told["answers"]] == [
        ("refine", False)
    ]


def test_the_largest_batch_before_ctrl_c_says_so(file, monkeypatch):
    stopping(monkeypatch, models, "dry_plan", 2)
    said = run("largest-batch", f"{file}:net", "--budget", "1MiB")
    assert "batch 2 fits, 3 was not tried before it was stopped; tried [1, 2]" in said


def test_an_error_that_ctrl_c_caused_is_not_told(capsys, monkeypatch):
    def fail(*args):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise remat.RematError("ImportError: initialization failed") from None

    monkeypatch.setattr("remat_solvers.list_solvers", fail)
    assert ended(capsys, monkeypatch, "solvers") == (130, "")
    monkeypatch.setattr("remat_solvers.list_solvers", lambda: {}["no"])
    with pytest.raises(KeyError):
        ended(capsys, monkeypatch, "solvers")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
