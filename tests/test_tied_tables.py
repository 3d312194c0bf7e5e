"""Language models whose head is their embedding hold one gradient of the table, not two."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integration_cases.sweeps import swept
from torch import nn
from torch.nn.functional import cross_entropy

import remat
from remat_exec import measure_peak
from remat_graph.torch import Call, TensorFacts, Variable
from remat_graph.torch.kernels.embedding import add_embedding_gradient
from remat_graph.torch.operators import operator_of

WORDS, WIDTH = 4000, 64
TABLE_BYTES = WORDS * WIDTH * 4


class Tied(nn.Module):
    """A decoder, or an encoder and a decoder, that shares its table with the head."""

    def __init__(self, *, lookups: int = 1, breaks: bool = False, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, **options)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.lookups, self.breaks = lookups, breaks

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for at, layer in enumerate(self.layers):
            x = x + layer(x).tanh()
            if at < self.lookups - 1:
                x = x + self.words(ids.flip(1))
            if at == 1 and self.breaks:
                torch._dynamo.graph_break()
        return cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def ids(length: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randint(0, WORDS, (2, length), generator=torch.Generator().manual_seed(seed))
    drawn[:, :3] = 1
    return drawn


MODELS: dict[str, dict[str, Any]] = {
    "head": {},
    "padding": {"padding_idx": 1},
    "by_frequency": {"scale_grad_by_freq": True},
    "two_lookups": {"lookups": 2},
    "breaks": {"breaks": True},
}


@pytest.mark.parametrize("name", swept(MODELS, ["padding"]))
def test_steps_of_any_length_have_the_bits_of_eager(name: str) -> None:
    torch.manual_seed(0)
    model = Tied(**MODELS[name])
    eager = copy.deepcopy(model)
    run = remat.rematerialize(model, (ids(24),), budget=1.0)
    for seed, length in enumerate((24, 24, 17, 30, 21)):
        for each in (model, eager):
            each.zero_grad()
        losses = [each(ids(length, seed)) for each in (run, eager)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]


@pytest.mark.parametrize("passes", ["", "-add-rows"])
def test_a_step_holds_one_gradient_of_the_table(
    passes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_PASSES", passes)
    torch.manual_seed(0)
    model = Tied()
    run = remat.rematerialize(model, (ids(8),), budget=2**23, numerics="rounding")
    run(ids(8)).backward()
    model.zero_grad()
    with measure_peak() as peak:
        run(ids(8)).backward()
    assert (peak.peak_bytes > 2 * TABLE_BYTES) == bool(passes)
    assert peak.peak_bytes <= run.plan.budget_bytes


@pytest.mark.parametrize("count", [0, 50])
def test_the_sum_takes_no_more_than_is_predicted(count: int) -> None:
    """Of an expanded gradient torch makes a copy; of no indices eager makes a table."""
    total, indices = torch.zeros(WORDS, WIDTH), torch.zeros(count, dtype=torch.int64)
    grad = torch.ones(1, WIDTH).expand(count, WIDTH)
    tensors = {"total": total, "grad": grad, "indices": indices}
    args = (*map(Variable, tensors), -1, False)
    call = Call(add_embedding_gradient, args, {}, ("sum",), sequence=False)
    facts = {name: TensorFacts.of(tensor) for name, tensor in tensors.items()}
    over, predict = operator_of(call.target).in_place, operator_of(call.target).workspace
    assert over is not None
    assert predict is not None
    with measure_peak() as peak:
        over(total, grad, indices, -1, False)
    assert peak.peak_bytes <= predict(facts, call) < TABLE_BYTES
