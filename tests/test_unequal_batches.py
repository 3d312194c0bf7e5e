"""Batches of other sizes within one step: micro-batches that add up, and ranks side by side."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn.functional import cross_entropy, gelu

import remat
from remat_exec import measure_peak


class Words(nn.Module):
    """A small language model: the sum of losses over all but the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + gelu(layer(x))
        return cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batch(draw: random.Random) -> torch.Tensor:
    rows, length = draw.randint(2, 6), draw.randint(8, 40)
    generator = torch.Generator().manual_seed(draw.randint(0, 1000))
    return torch.randint(0, 40, (rows, length), generator=generator)


def test_gradients_add_up_over_unequal_micro_batches() -> None:
    torch.manual_seed(0)
    eager = Words()
    model = copy.deepcopy(eager)
    budget = 2**20
    run, draw, over = remat.rematerialize(model, budget=budget), random.Random(0), 0
    for step in range(12):
        eager.zero_grad()
        model.zero_grad()
        for _ in range(3):
            ids = batch(draw)
            eager(ids).backward()
            with measure_peak() as peak, warnings.catch_warnings():
                warnings.simplefilter("error", remat.BudgetWarning)
                run(ids).backward()
            over += peak.peak_bytes > budget
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs), step
    assert not over


def _train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    eager = Words()
    model = copy.deepcopy(eager)
    parallel = nn.parallel.DistributedDataParallel(remat.rematerialize(model, budget=2**20))
    plain, draw = nn.parallel.DistributedDataParallel(eager), random.Random(rank)
    same = True
    for _ in range(6):
        ids = batch(draw)
        for each in (plain, parallel):
            each.zero_grad()
            each(ids).backward()
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        same = same and all(torch.equal(one.grad, other.grad) for one, other in pairs)
    Path(folder, f"rank {rank}").write_text(str(same))
    distributed.destroy_process_group()


def test_ranks_have_batches_of_other_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_train, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    assert [(tmp_path / f"rank {rank}").read_text() for rank in range(2)] == ["True", "True"]
