"""The command: models and graphs by name, tables or JSON, exit codes."""

import json
import os
import signal
import sys
import time
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import remat
import remat_solvers
from remat.command import app, curves, main, models, terminal
from remat.command.terminal import Left, check_output
from remat.planning import cutting, solving
from remat_graph import load, save
from remat_graph.schedule import Solution, Status
from remat_partition import partition
from remat_solvers.core import trust
from remat_solvers.errors import format_bytes
from remat_solvers.refine import Refine

FACTORY = """
import torch

def net(batch=64, depth=5):
    layers = (m for _ in range(depth) for m in (torch.nn.Linear(64, 64), torch.nn.GELU()))
    return torch.nn.Sequential(*layers), torch.zeros(batch, 64)

def odd():
    return 1

def beside():
    from sizes import WIDTH
    return torch.nn.Linear(WIDTH, 1), torch.zeros(1, WIDTH)

def failing(depth=1):
    return torch.nn.Linear(depth, 1)

def heavy():
    return torch.nn.Linear(int(torch.ones(()).item()), 1), torch.zeros(1, 1)

def ends():
    raise SystemExit(7)

class Loud(torch.nn.Linear):
    def forward(self, x):
        print("running")
        return super().forward(x)

def stopped():
    raise KeyboardInterrupt

def chatty():
    import subprocess, sys
    subprocess.run([sys.executable, "-c", "print('from a child')"])
    return Loud(4, 4), torch.zeros(1, 4)

def loud():
    print("making")
    return Loud(4, 4), torch.zeros(1, 4)

def dropping():
    layers = (m for _ in range(3) for m in (torch.nn.Linear(64, 64), torch.nn.Dropout(0.1)))
    return torch.nn.Sequential(*layers), torch.zeros(64, 64)

class Head(torch.nn.Linear):
    def forward(self, x, y):
        scores = super().forward(x)
        return {"loss": torch.nn.functional.cross_entropy(scores, y), "scores": scores}

def head():
    return Head(4, 500), (torch.zeros(64, 4), torch.zeros(64, dtype=torch.long))
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # where the command puts the folder of the file
    (tmp_path / "nets.py").write_text(FACTORY)
    return tmp_path / "nets.py"


def run(*words):
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "120"})
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def run_json(*words):
    return json.loads(run(*words, "--json"))


def ended(capsys, monkeypatch, *words):
    """Run as a user does; give the exit code and what is said."""
    monkeypatch.setattr(sys, "argv", ["remat", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, " ".join(capsys.readouterr().err.split())


def test_a_plan_made_by_the_command_is_used(file, tmp_path):
    saved = tmp_path / "plan.json"
    told = run_json(
        "plan", f"{file}:net", "--budget", "170KiB", "--set", "depth=6", "--save", saved
    )
    assert told["recomputations"] > 0
    assert told["predicted_peak_bytes"] <= told["budget_bytes"] == 170 * 1024
    layers = (m for _ in range(6) for m in (torch.nn.Linear(64, 64), torch.nn.GELU()))
    model = torch.nn.Sequential(*layers)
    made = remat.rematerialize(model, torch.randn(64, 64), plan=saved, budget="200KiB")
    assert made.plan.recomputations == told["recomputations"]
    assert "written to" in run("plan", f"{file}:net", "--budget", "1MiB", "--save", saved)


def test_a_factory_may_import_what_lies_beside_its_file(file):
    (file.parent / "sizes.py").write_text("WIDTH = 3")
    assert run_json("plan", f"{file}:beside", "--budget", "100%")["operations"] > 0
    sys.modules.pop("sizes")


def test_it_is_said_what_is_planned_for(file, capsys, monkeypatch):
    _, said = ended(capsys, monkeypatch, "plan", f"{file}:net", "--budget", "1MiB")
    assert "planning for Sequential(64x64 float32)" in said


def test_what_a_model_prints_is_not_amid_json(file):
    assert run_json("plan", f"{file}:loud", "--budget", "1MiB")["operations"] > 0


@pytest.mark.sweep
def test_a_model_type_is_planned_for_without_weights():
    sizes = ("--set", "n_layer=1", "--set", "n_embd=32", "--set", "n_head=2")
    words = ("plan", "gpt2", "--seq", "16", "--batch", "2", *sizes, "--set", "vocab_size=50")
    ends = ("--set", "bos_token_id=0", "--set", "eos_token_id=0", "--budget", "100%")
    slow, fast = (run_json(*words, *ends, "--device", name) for name in ("l4", "h100"))
    assert slow["operations"] == fast["operations"]
    assert slow["time"] > fast["time"]


@pytest.mark.parametrize(
    "words",
    [
        ("gpt2", "--set", "num_hidden_layers=1", "--set", "hidden_size=48"),  # as others say it
        pytest.param(
            ("clip", "--set", "vision_config={'num_hidden_layers': 1, 'image_size': 64}"),
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_sizes_of_a_model_type_by_other_names_and_within_it(words):
    told = run_json("plan", *words, "--batch", "1", "--budget", "100%")
    assert 0 < told["operations"] < 200


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan", "nosuch", "--budget", "50%"], 1, "gpt2"),
        (["plan", "FILE:none", "--budget", "50%"], 1, "no function 'none'"),
        (["plan", "FILE:odd", "--budget", "50%"], 1, "must return (model, args)"),
        (["plan", "FILE:heavy", "--budget", "50%"], 1, "--measure"),
        (["plan", "FILE:ends", "--budget", "50%"], 1, "ends Python (exit code 7)"),
        (["plan", "FILE:failing", "--budget", "50%", "--set", "depth=[]"], 1, "nets.py, line 16)"),
        (["plan", "FILE:net", "--budget", "50%", "--limit-seconds=-1"], 2, "'--limit-seconds'"),
        (["plan", "FILE:net", "--budget", "50%", "--seq", "3"], 1, "does not take"),
        (["plan", "FILE:net", "--budget", "50%", "--set", "depth"], 1, "key=value"),
        (["plan", "FILE:net", "--budget", "50%", "--device", "z80"], 2, "h100"),
        (["plan", "FILE", "--budget", "50%"], 1, ".py:FUNCTION"),
        (["plan", "FILE:net", "--device", "l4", "--measure"], 1, "leave out --device"),
        (["plan", "FILE:net", "--budget", "auto"], 1, "bytes, a share, --measure or --device"),
        (["plan", "gpt2", "--budget", "1GiB", "--set", "layers=3"], 1, "has no layers"),
        (["plan", "FILE:net", "--budget", "1KiB"], 3, "budget 1 KiB is below"),
        (["plan", "FILE:head", "--budget", "1KiB"], 3, "numerics='rounding'"),
        (["plan", "FILE:head", "--budget", "1MiB", "--outputs", "los"], 1, "has 'loss', 'scores'"),
        (["plan", "FILE:net", "--budget", "120%"], 1, "for bytes give a number with a unit"),
        (["largest-batch", "FILE:net", "--budget", "1KiB"], 3, "not even a batch of one fits"),
        (["explain", "FILE"], 1, ".py:FUNCTION"),
        (["plan", "FILE:net"], 1, "--budget is needed"),
        (["compare", "FILE:net", "--budget", "auto", "--device", "l4"], 1, "'auto' is for a plan"),
        (["plan", "nowhere.py:net", "--budget", "50%"], 1, "no file"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_code(file, capsys, monkeypatch, words, code, said):
    found, text = ended(capsys, monkeypatch, *(word.replace("FILE", str(file)) for word in words))
    assert found == code
    assert said in text


def test_an_error_is_a_document_where_json_is_asked_for(file, capsys, monkeypatch):
    words = ["remat", "plan", f"{file}:net", "--budget", "1KiB"]
    monkeypatch.setattr(sys, "argv", [*words, "--json"])
    with pytest.raises(SystemExit, match="3"):
        main()
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["error"] == "BudgetTooSmall"
    assert "budget 1 KiB is below" in err
    assert told["message"] in err
    assert told["budget_bytes"] == 1024 < told["least_bytes"] <= told["smallest_bytes"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "code", "error", "said"),
    [
        (["plan"], 2, "MissingParameter", "Missing"),
        (["plan", "FILE:net", "--batch", "0"], 2, "BadParameter", "'--batch'"),
        (["plan", "FILE:net", "--no-such"], 2, "NoSuchOption", "--no-such"),
        (["plan", "FILE:stopped", "--budget", "50%"], 130, "KeyboardInterrupt", "stopped"),
    ],
)
def test_so_is_a_wrong_command_line_and_ctrl_c(file, capsys, monkeypatch, words, code, error, said):
    given = [word.replace("FILE", str(file)) for word in words]
    monkeypatch.setattr(sys, "argv", ["remat", *given, "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    told = json.loads(capsys.readouterr().out)
    assert (end.value.code, told["error"]) == (code, error)
    assert said in told["message"]


def test_what_a_child_of_a_model_prints_is_not_amid_json(file, capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["remat", "plan", f"{file}:chatty", "--budget=1MiB", "--json"])
    with pytest.raises(SystemExit, match="0"):
        main()
    out, err = capfd.readouterr()
    assert json.loads(out)["operations"] > 0
    assert "from a child" in err


@pytest.fixture
def graph(file, tmp_path):
    made = run_json("plan", f"{file}:net", "--budget", "1MiB", "--save", tmp_path / "all.json")
    assert made["recomputations"] == 0
    save(remat.Plan.load(tmp_path / "all.json").graph, tmp_path / "graph.json")
    return tmp_path / "graph.json"


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


def test_a_terminal_of_few_letters_is_no_error(graph, monkeypatch):
    plan = graph.with_name("plän ☃ \udcff.json")
    plan.write_bytes(graph.with_name("all.json").read_bytes())
    written = TextIOWrapper(BytesIO(), "ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "argv", ["remat", "trace", str(plan), "-o", str(plan)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert rb"pl\xe4n \u2603 \udcff.json" in written.buffer.getvalue()


def test_the_time_left_is_that_of_the_search():
    left = Left(30.0)
    assert not left.render(None).plain
    left.searching(9.6)
    left.searching(0.0)  # of the next solver
    assert left.render(None).plain.startswith("20 s left")
    assert not Left(None).render(None).plain


def test_what_is_done_gives_way_to_the_time_left(monkeypatch):
    shown = StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr(terminal, "err", console)
    monkeypatch.setattr(terminal, "_QUIET_SECONDS", 0.0)
    with terminal.waiting("capturing and solving", 30.0) as report:
        report(remat_solvers.Progress("refine", 1, None, None, None, 1.0, "checkpoints " * 20))
        while "Ctrl-C keeps the best" not in shown.getvalue():
            time.sleep(0.01)
    assert "capturing and solving: check" in shown.getvalue()


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


def test_the_largest_batch(file, capsys, monkeypatch):
    words = ("largest-batch", f"{file}:net", "--budget", "19KiB", "--set", "depth=1")
    told = run_json(*words)
    assert told["predicted_peak_bytes"] <= 19 * 1024
    assert {told["batch_size"], told["batch_size"] + 1} <= {*told["tried"]}
    code, said = ended(capsys, monkeypatch, *words, "--most-overhead=-1%")
    assert (code, "most-overhead" in said) == (2, True)
    code, said = ended(capsys, monkeypatch, *words, "--most-overhead=-0.1")
    assert (code, "not even a batch of one" in said) == (1, True)


@pytest.mark.parametrize("largest", [0, 1, 2, 5, 8, 100])
def test_batches_are_doubled_then_halved(largest):
    asked = []
    models._search(lambda size: asked.append(size) or size <= largest)
    assert largest + 1 in asked
    assert largest in (0, *asked)
    assert len(asked) == len({*asked}) <= 16


@pytest.mark.sweep
def test_a_curve_and_a_batch_without_what_is_not_read(file, capsys, monkeypatch):
    words = "tradeoff", f"{file}:head", "--points", "2"
    everything, less = (
        run_json(*words, *more)["body"]["store_all_peak_bytes"]
        for more in ((), ("--outputs", "loss", "--optimizer-in-backward"))
    )
    assert less < everything
    words = "largest-batch", f"{file}:net", "--budget", "40KiB", "--set", "depth=2"
    batches = [run_json(*words, *more)["batch_size"] for more in ((), ("--optimizer-in-backward",))]
    assert batches[0] < batches[1]
    for command, factory in (("tradeoff", "head"), ("largest-batch", "net")):
        words = command, f"{file}:{factory}", "--budget", "1MiB", "--outputs", "losses"
        code, said = ended(capsys, monkeypatch, *words)
        assert (code, "'losses'" in said) == (1, True)


@pytest.mark.sweep
def test_a_curve_and_a_batch_by_compiled_groups(file):
    words = "tradeoff", f"{file}:net", "--points", "2", "--device", "a100"
    eager, grouped = (run_json(*words, *more)["body"] for more in ((), ("--kernels", "inductor")))
    assert grouped["smallest_bytes"] <= eager["smallest_bytes"]
    runs = [json.dumps(each["points"][-1]["solution"]) for each in (eager, grouped)]
    assert ["fused" in run for run in runs] == [False, True]
    words = "largest-batch", f"{file}:net", "--budget", "19KiB", "--set", "depth=1"
    assert run_json(*words, "--kernels", "inductor")["batch_size"] >= run_json(*words)["batch_size"]


@pytest.mark.sweep
def test_a_curve_of_a_model_as_json(file):
    told = run_json("tradeoff", f"{file}:net", "--points", "2", "--device", "a100")
    assert len(told["body"]["points"]) == 2


def test_what_the_command_plans_is_cached(file, tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "cache"))
    words = "plan", f"{file}:net", "--budget", "170KiB"
    first = run_json(*words)
    batch = "largest-batch", f"{file}:net", "--budget", "19KiB", "--set", "depth=1"
    largest = run_json(*batch)["batch_size"]
    solve = solving.solve

    def only_refuse(*args, **kwargs):
        raise AssertionError(f"solved again: {solve(*args, **kwargs)}")

    monkeypatch.setattr(solving, "solve", only_refuse)
    assert run_json(*words)["recomputations"] == first["recomputations"]
    assert run_json(*batch)["batch_size"] == largest


def test_what_is_cached_is_listed_and_cleared(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "cache"))
    remat.plan(torch.nn.Linear(3, 3), torch.zeros(2, 3), budget="1MiB", costs="estimate")
    assert run("cache", "path").strip() == str(tmp_path / "cache" / "v1")
    (entry,) = run_json("cache", "list")
    assert entry["kind"] == "solutions"
    assert "solutions" in run("cache", "list")
    assert run_json("cache", "clear")["entries"] == 1
    assert run_json("cache", "list") == []
    monkeypatch.setenv("REMAT_CACHE", "0")
    assert "switches the cache off" in ended(capsys, monkeypatch, "cache", "list")[1]


def test_the_doctor_says_what_will_not_work(monkeypatch):
    told = run_json("doctor")
    assert told["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert told["cache"] is None
    installed = [said for said in told["versions"].values() if said is not None]
    assert not [said for said in installed if "not stated" in said]
    assert ("training on CUDA: torch sees no device" in told["will_not_work"]) != (
        torch.cuda.is_available()
    )
    assert "highspy" in run("doctor")
    assert "refine" in run_json("solvers")


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


def test_every_command_speaks_json():
    def commands(group):
        for command in group.commands.values():
            yield from commands(command) if hasattr(command, "commands") else [command]

    for command in commands(typer.main.get_command(app)):
        assert any("--json" in option.opts for option in command.params), command.name


def test_help_lists_what_is_used_first_first():
    text = run("-h")
    at = [text.index(f" {name} ") for name in ("plan", "largest-batch", "solvers", "cache")]
    assert at == sorted(at)


def test_without_a_budget_a_device_is_filled(file):
    told = run_json("plan", f"{file}:net", "--device", "4090")
    memory = remat.DEVICES["4090"].memory_bytes
    assert 0.89 * memory < told["budget_bytes"] < 0.9 * memory


def test_a_device_without_room_or_without_a_known_memory_is_named():
    call = torch.nn.Linear(100, 100), torch.randn(1, 100)
    rates = 1e12, 1e12, 1e12, 1e-6
    with pytest.raises(remat.BudgetError, match=r"of small the model takes 40,400 .* 80,800"):
        remat.plan(*call, budget="auto", costs=remat.DeviceSpec("small", *rates, 100_000))
    with pytest.raises(remat.BudgetError, match="no memory_bytes"):
        remat.plan(*call, budget="auto", costs=remat.DeviceSpec("unknown", *rates))


def test_what_gradients_alone_take_is_told():
    with pytest.raises(remat.BudgetTooSmall, match=r"gradients of parameters, are .*fewer"):
        remat.plan(torch.nn.Linear(500, 500), torch.randn(1, 500), budget="1KiB", costs="estimate")


def test_outputs_that_are_not_named_are_not_made(file, tmp_path):
    saved = tmp_path / "plan.json"
    assert "made when read" not in run("plan", f"{file}:head", "--budget", "1MiB")
    for named in ("loss", "0", "loss, 0"):
        text = run("plan", f"{file}:head", "--budget", "1MiB", "--outputs", named, "--save", saved)
        assert "made when read" in text
        assert remat.Plan.load(saved).kinds[0].deferred == ((1, 64 * 500 * 4),)
    run("plan", f"{file}:head", "--budget", "1MiB", "--outputs", "loss,scores", "--save", saved)
    assert not remat.Plan.load(saved).kinds[0].deferred


def test_other_ways_to_make_a_value_and_another_cut(file, tmp_path, capsys, monkeypatch):
    model = (f"{file}:net", "--budget", "80%", "--limit-seconds", "1")
    saved = tmp_path / "plan.json"
    ways = f"{file}:dropping", "--budget", "100%"
    run("plan", *ways, "--numerics", "bitwise", "--save", saved)
    assert remat.Plan.load(saved).graph.has_alternatives
    run("plan", *ways, "--save", saved)
    assert not remat.Plan.load(saved).graph.has_alternatives
    cut = []
    monkeypatch.setattr(cutting, "partition", lambda *a, **k: cut.append(k) or partition(*a, **k))
    run("plan", *model, "--solver", "h-ilp", "--partitioner", "sequence")
    assert [each["partitioner"] for each in cut] == ["sequence"]
    code, said = ended(capsys, monkeypatch, "plan", *model, "--partitioner", "sequence")
    assert (code, "takes the graph as it is" in said) == (1, True)
