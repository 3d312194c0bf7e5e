"""A few of the architectures of `benchmarks/matrix.py`, by its own judgement."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from integration_cases.sweeps import swept
from torch import nn

import matrix_cases
import remat
from matrix_cases import judging, other_sizes
from matrix_cases.case import Built, Case
from matrix_cases.training import train

CASES = ("deberta_v2", "fnet", "patchtst")
PLANNING_SECONDS = 0.1  # what counts here is that they train


@pytest.mark.parametrize("name", swept(CASES, []))
def test_trains_as_eager_does_within_the_budget(name, monkeypatch):
    monkeypatch.setattr(judging, "PLANNING_SECONDS", PLANNING_SECONDS)
    outcome = matrix_cases.run_case(f"transformers/{name}")
    assert outcome.category in ("right", "rounding"), f"{outcome.category}: {outcome.reason}"
    assert outcome.bitwise
    assert outcome.peak_bytes <= outcome.budget_bytes


def test_every_name_is_of_a_case():
    for kind in matrix_cases.KINDS:
        names = matrix_cases.names(kind)
        assert len(set(names)) == len(names)
        assert all(name.startswith(f"{kind}/") for name in names)


def test_most_architectures_have_a_case():
    assert len(matrix_cases.names("transformers")) >= 200
    assert len(matrix_cases.names("modules")) >= 100


def test_an_unknown_name_is_an_error():
    with pytest.raises(KeyError):
        matrix_cases.find("transformers/none-such")


class Sum(nn.Module):
    """Adds up words and a mask over pairs of them, which are in sentences of at most ten."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 8)

    def forward(self, ids, mask):
        states = torch.tanh(self.head(self.words(ids)))
        if ids.shape[1] > 10:
            raise ValueError("too long")
        return (mask @ states).square().mean()


def sentences():
    return Built(Sum(), (torch.randint(0, 12, (3, 8)), torch.randn(8, 8)))


def test_sizes_are_drawn_that_eager_can_run_with_and_the_same_ones_for_a_seed():
    drawn = other_sizes.draw_sizes(sentences, 0)
    rows, words = ({axis.size: axis.places for axis in drawn.axes}[size] for size in (3, 8))
    assert rows == {(0, 0)}
    assert words == {(0, 1), (1, 0), (1, 1)}
    assert drawn.steps[0] == tuple(axis.size for axis in drawn.axes)
    assert len(set(drawn.steps)) > 3
    assert drawn == other_sizes.draw_sizes(sentences, 0) != other_sizes.draw_sizes(sentences, 1)
    for call, sizes in zip(drawn.calls(sentences()), drawn.steps, strict=True):
        ids, mask = call.args
        assert sorted(ids.shape) == sorted(sizes)
        assert max(sizes) <= 10
        assert mask.shape == (ids.shape[1], ids.shape[1])


@pytest.mark.sweep
def test_a_case_of_drawn_sizes_trains_as_eager_does_within_the_budget():
    outcome = matrix_cases.judge(Case("own/sum", lambda: [("", sentences)]), seed=0)
    assert outcome.category == "right", outcome.reason
    assert outcome.bitwise
    assert outcome.peak_bytes <= outcome.budget_bytes
    assert outcome.counts["traced as it comes"] == 2
    assert outcome.counts["traced with symbols"] == 1


def test_a_case_whose_inputs_have_one_size_is_not_counted():
    case = Case("own/linear", lambda: [("", lambda: Built(nn.Linear(4, 4), (torch.ones(4),)))])
    assert matrix_cases.judge(case, seed=0).category == "one size"


class Telling(nn.Module):
    """Has a budget of one byte, and tells of it at the begin of its forward or after a loss."""

    def __init__(self, model, told):
        super().__init__()
        self.model, self.told, self.step = model, told, 0
        self.plan = SimpleNamespace(budget_bytes=1)

    def forward(self, rows):
        self.step += 1
        if message := self.told.get(self.step):
            warnings.warn(message, remat.BudgetWarning, stacklevel=2)
        return self.model(rows)


NO_PLAN = "no plan leaves room"
TOOK = "a step took 8 bytes"


@pytest.mark.parametrize(
    ("told", "before", "after"),
    [
        ({1: NO_PLAN}, [(NO_PLAN,), (), (NO_PLAN,)], [(), (), ()]),
        ({2: TOOK}, [(TOOK,), (), (TOOK,)], [(), (), ()]),
        ({3: TOOK}, [(), (TOOK,), ()], [(), (), ()]),
        ({6: NO_PLAN}, [(), (), ()], [(), (NO_PLAN,), ()]),
        ({8: TOOK}, [(), (), ()], [(), (TOOK,), ()]),
    ],
)
def test_a_warning_is_told_of_the_sizes_of_its_step_alone(told, before, after):
    model = nn.Linear(4, 4)
    calls = [Built(model, (torch.ones(rows, 4),)) for rows in (2, 3, 2)]
    trained = train(calls, lambda model: Telling(model, told))
    assert [step.told_before for step in trained.measured] == before
    assert [step.told_over for step in trained.measured] == after
    assert judging._judge_peaks(trained, 1, sized=True)[0] == "OVER"
    told = {1: NO_PLAN, 2: NO_PLAN}
    trained = train(calls, lambda model: Telling(model, told))
    assert judging._judge_peaks(trained, 1, sized=True)[0] == "told over"
    assert judging._judge_peaks(trained, 1, sized=False)[0] == "OVER"


def test_nothing_is_cut_below_what_a_ctc_loss_reads_of_it():
    lengths = torch.tensor([4, 3])

    def built():
        scores = torch.randn(9, 2, 5).log_softmax(2).requires_grad_()
        return Built(nn.CTCLoss(), (scores, torch.full((2, 4), 4), lengths + 5, lengths))

    drawn = other_sizes.draw_sizes(built, 0)
    assert drawn.axes
    for call in drawn.calls(built()):
        scores, targets, *_ = call.args
        assert scores.shape[2] >= 5
        assert targets.shape[1] >= 4
