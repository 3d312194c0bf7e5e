"""LSTMs on the CPU are planned by the layers that eager runs, in steps where none such fits."""

import copy

import pytest
import torch
from torch import nn

import remat
from remat_exec import measure_peak
from remat_graph.torch.tracing import aot


class Net(nn.Module):
    def __init__(self, layers=3, **options):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.rnn = nn.Linear(16, 16), nn.LSTM(16, 24, layers, **options)
        self.leave = nn.Linear(24 * (2 if self.rnn.bidirectional else 1), 16)

    def forward(self, x):
        rows, (hn, cn) = self.rnn(self.enter(x).tanh())
        return (self.leave(rows) - x).square().mean() + hn.sum() / 50 + cn.square().mean()


def record(model, x, *, bits=None):
    torch.manual_seed(3)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bits == 16):
        loss = model(x)
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters())]


def same_bits(*records):
    return all(map(torch.equal, *records))


def peak_of(model, x):
    model.zero_grad()
    with measure_peak() as peak:
        model(x).backward()
    return peak.peak_bytes


def rematerialized(model, budget):
    return remat.rematerialize(copy.deepcopy(model), budget=budget, limit_seconds=0.2)


def compiled(model, budget):
    torch._dynamo.reset()  # what other tests compiled counts towards its limit
    options = {"budget": budget, "limit_seconds": 0.2}
    return torch.compile(copy.deepcopy(model), backend="remat", options=options)


def layers_in(model):
    return model.plan.source.count("= remat_lstm_layer_default__(")


@pytest.mark.parametrize("door", [rematerialized, compiled])
def test_layers_are_computed_again_within_the_budget(door):
    plain, x = Net(), torch.randn(40, 8, 16)
    budget = int(0.6 * peak_of(plain, x))
    model = door(plain, budget)
    for _ in range(2):
        assert same_bits(record(model, x), record(plain, x))
    assert peak_of(model, x) <= budget
    if door is rematerialized:
        assert layers_in(model) > plain.rnn.num_layers


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"dropout": 0.5, "bidirectional": True}, 16),
        ({"bias": False, "batch_first": True}, None),
        pytest.param({"dropout": 0.5, "bidirectional": True}, None, marks=pytest.mark.sweep),
        pytest.param({"bias": False, "batch_first": True}, 16, marks=pytest.mark.sweep),
    ],
)
def test_steps_have_the_bits_of_eager(options, bits):
    plain, x = Net(2, **options), torch.randn(5, 3, 16)
    model = rematerialized(plain, "1MiB")
    assert same_bits(record(model, x, bits=bits), record(plain, x, bits=bits))
    assert layers_in(model) == 2 * (2 if plain.rnn.bidirectional else 1)


def test_where_layers_do_not_fit_they_are_planned_in_steps():
    plain, x = Net(1), torch.randn(9, 8, 16)
    budget = int(0.6 * peak_of(plain, x))
    model = rematerialized(plain, budget)
    torch.testing.assert_close(record(model, x), record(plain, x), rtol=1e-4, atol=1e-6)
    assert layers_in(model) == 0
    assert peak_of(model, x) <= budget
    short = x[:3]  # which fits
    assert same_bits(record(model, short), record(plain, short))


def test_a_plan_file_is_of_layers_or_of_steps(tmp_path):
    for layers, share, count in ((2, 1.0, 2), (1, 0.6, 0)):
        plain, x = Net(layers), torch.randn(9, 8, 16)
        first = rematerialized(plain, int(share * peak_of(plain, x)))
        record(first, x)
        assert layers_in(first) == count
        first.plan.save(tmp_path / "plan.json")
        again = remat.rematerialize(copy.deepcopy(plain), plan=tmp_path / "plan.json")
        assert same_bits(record(again, x), record(first, x))
        assert layers_in(again) == count
        assert again.plan.source == first.plan.source


@pytest.mark.parametrize("door", [rematerialized, pytest.param(compiled, marks=pytest.mark.sweep)])
def test_lengths_and_batches_are_symbols(door, monkeypatch):
    plain, traces = Net(2, bidirectional=True), []
    original = aot._exported
    monkeypatch.setattr(aot, "_exported", lambda *args: traces.append(1) or original(*args))
    model = door(plain, "8MiB")
    counts = []
    for length, batch in [(5, 3), (6, 4), (7, 5), (12, 3), (30, 8)]:
        x = torch.randn(length, batch, 16)
        assert same_bits(record(model, x), record(plain, x))
        counts.append(len(traces))
    assert counts[2] == counts[-1] <= 3


def test_a_plan_without_data_goes_in_steps_too():
    model, x = Net(1).to("meta"), torch.empty(12, 8, 16, device="meta")
    whole = remat.plan(model, x, budget=1.0, costs="estimate")
    less = remat.plan(model, x, budget=0.5, costs="estimate")
    assert "lstm_layer" in whole.source
    assert "lstm_layer" not in less.source
    assert less.predicted_peak_bytes <= less.budget_bytes < 0.51 * whole.plain_peak_bytes
