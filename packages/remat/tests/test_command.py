"""The command: models and graphs by name, tables or JSON, exit codes."""

import json
import sys
import time
from io import BytesIO, StringIO, TextIOWrapper

import pytest
import torch
import typer
from remat_cases.commands import ended, run, run_json
from rich.console import Console

import remat
import remat_solvers
from remat.command import app, main, terminal
from remat.command.terminal import Left
from remat.planning import cutting, solving
from remat_partition import partition


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
