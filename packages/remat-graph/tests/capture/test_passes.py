"""Passes between tracing and lowering: their order, leaving some out, and what each does."""

import itertools
import logging

import pytest
import torch
from torch import nn

from remat_graph.torch import CaptureError, capture, passes_of
from remat_graph.torch.rewrites.passes import EACH, ONCE, Setting, run_passes

OPTIONAL = ["drop-statistics", "drop-copies", "add-rows", "merge-equal", "name-causal-masks"]


class Model(nn.Module):
    """Gives each pass that may be left out something to do, and tied parameters."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.out.weight

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        position = torch.arange(x.shape[1])
        mask = position[:, None] >= position[None, :]
        h = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]
        h = h + nn.functional.embedding(position, self.tied.weight)
        h = self.norm(h.double().float() + h.double().float())
        return self.tied(self.out(h.clone())).square().sum()


X = torch.rand(4, 6, 8)


@pytest.fixture(scope="module")
def runs():
    """What each pass did to the program."""
    return passes_of(Model(), (X,))


def calls():
    program = capture(Model(), (X,), costs="estimate").program
    return [(call.target, call.args, call.kwargs) for call in program.calls.values()]


def test_passes_run_in_their_order(runs):
    assert [run.name for run in runs] == [each.name for each in ONCE + EACH]
    assert [each.name for each in EACH if not each.required] == OPTIONAL


def test_what_is_shown_is_the_program_of_the_capture(runs):
    for before, after in itertools.pairwise(runs):
        assert before.after == after.before
    program = capture(Model(), (X,)).program
    names = {line.partition(":")[0].partition(" ")[0] for line in runs[-1].after.splitlines()}
    assert program.calls.keys() | program.views.keys() <= names


@pytest.mark.parametrize(
    ("name", "gone", "new"),
    [
        ("merge-tied", "parameter tied.weight", "aten.add.Tensor("),
        ("drop-statistics", "aten.native_batch_norm_backward", "None, None"),
        ("drop-copies", "view.default(clone", "view.default(getitem"),
        ("add-rows", "aten.embedding_dense_backward.default(", "remat.add_embedding_gradient"),
        ("merge-equal", "aten._to_copy.default(", "aten.add.Tensor("),
        ("name-causal-masks", "attn_mask=", "True"),
    ],
)
def test_a_diff_shows_what_a_pass_did(runs, name, gone, new):
    (run,) = (run for run in runs if run.name == name)
    lines = run.diff.splitlines()
    assert any(line.startswith("-") and gone in line for line in lines[2:]), str(run)
    assert any(line.startswith("+") and new in line for line in lines[2:]), str(run)
    assert str(run).startswith(name)
    assert run.does in str(run)


def test_lines_say_where_they_are_from(runs):
    run = runs[0]
    assert "no change" in str(run)
    assert any("# norm " in line and "test_passes.py:" in line for line in run.after.splitlines())


@pytest.fixture(scope="module")
def before():
    """The calls of the program with all passes."""
    return calls()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "name-causal-masks" else pytest.mark.sweep)
        for name in OPTIONAL
    ],
)
def test_a_pass_that_is_left_out_does_nothing(name, before, monkeypatch):
    monkeypatch.setenv("REMAT_PASSES", f"-{name}")
    assert calls() != before
    assert name not in {run.name for run in passes_of(Model(), (X,), costs="estimate")}


def test_an_empty_list_leaves_out_no_pass(before, monkeypatch):
    monkeypatch.setenv("REMAT_PASSES", "")
    assert calls() == before


@pytest.mark.parametrize("each", [each for each in ONCE + EACH if each.required])
def test_a_required_pass_is_not_left_out(each, monkeypatch):
    monkeypatch.setenv("REMAT_PASSES", f"-drop-copies, -{each.name}")
    with pytest.raises(CaptureError, match=f"'-{each.name}'.*would be wrong: {each.required}"):
        run_passes((), None, Setting())


@pytest.mark.parametrize("setting", ["-drop", "drop-copies", "-drop-copies,no"])
def test_an_unknown_pass_is_refused_with_the_names_that_are_known(setting, monkeypatch):
    monkeypatch.setenv("REMAT_PASSES", setting)
    with pytest.raises(CaptureError, match=", ".join(OPTIONAL)):
        capture(Model(), (X,), costs="estimate")


def test_passes_are_timed(caplog):
    with caplog.at_level(logging.DEBUG, "remat_graph"):
        capture(Model(), (X,), costs="estimate")
    timed = [record.args[0] for record in caplog.records if record.msg.startswith("pass ")]
    assert timed == [each.name for each in ONCE + EACH]


def test_a_model_without_data_is_shown_too():
    with torch.device("meta"):
        model, x = Model(), torch.rand(4, 6, 8)
    assert [run.name for run in passes_of(model, (x,), costs="estimate")]
    with pytest.raises(CaptureError, match="nothing can be measured"):
        passes_of(model, (x,))
