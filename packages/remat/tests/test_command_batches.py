"""The largest batch and the curve of a model, by the command."""

import json

import pytest
from remat_cases.commands import ended, run_json

from remat.command import models


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
