"""NumPy in a forward: its numbers are Python's in a graph; its arrays and types are in none."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import remat

IDS = torch.arange(8)
Use = Callable[["Using", torch.Tensor], torch.Tensor]


class Using(nn.Module):
    """A layer whose result is used with what NumPy made."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(8, 8), use
        self.scale, self.width, self.flag = np.float64(1.7), np.int64(3), np.bool_(True)
        self.whole, self.table = np.arange(8), np.linspace(0, 1, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, self.layer(x))


NUMBERS: dict[str, Use] = {
    "scaled": lambda m, x: x * m.scale,
    "with integers": lambda m, x: x * (IDS * m.scale),
    "with a sum": lambda m, x: x * (IDS.sum() * m.scale),
    "as a type": lambda m, x: x * torch.arange(m.width)[:1] * torch.full((8,), m.scale),
    "as sizes": lambda m, x: x[:, :6].reshape(-1, m.width, 2) * x[:, : m.width].mean(),
    "as alpha": lambda m, x: torch.add(x, IDS, alpha=m.width),
    "as a branch": lambda m, x: x if m.scale > 1 else -x,
    "as a share": lambda m, x: x * (IDS / m.width),
    "of numbers": lambda m, x: x / np.sqrt(8) + IDS * np.log(3.0) * np.maximum(m.scale, 2),
    "counted": lambda m, x: x[:, : int(np.ceil(7 / 2))] * int(np.prod([2, 3])),
    "of a size": lambda m, x: x / np.sqrt(x.shape[0]) * int(np.floor(x.shape[0] / 2)),
    "of sizes": lambda m, x: x.reshape(np.prod(x.shape)),
}
ARRAYS: dict[str, Use] = {
    "integers by integers": lambda m, x: x * torch.from_numpy(m.whole / np.arange(1, 9)),
    "root": lambda m, x: x * torch.from_numpy(np.cbrt(m.whole - 4.0)),
    "median": lambda m, x: x * float(np.median(x.detach().numpy())),
    "percentile": lambda m, x: x.clamp(max=float(np.percentile(x.detach().numpy(), 90))),
    "triangle": lambda m, x: x[np.tril_indices(4)],
    "one of them": lambda m, x: x * (IDS * m.table[3]),
    "not a flag": lambda m, x: x * 2 if ~m.flag else x * (m.flag + m.flag),
    "of what type": lambda m, x: x if isinstance(m.width, int) else -x * round(m.scale * 1.5, 1),
    "what it has": lambda m, x: x if hasattr(m.width, "dtype") else -x,
    "its own attributes": lambda m, x: x * m.scale.astype(np.float32) * m.width.item(),
    "is it a number": lambda m, x: x if np.isnan(m.scale) else -x,
    "its spread": lambda m, x: x / x.detach().numpy().std(),
    "tensor of a number": lambda m, x: x * torch.tensor(np.sqrt(8)) * torch.tensor([m.scale] * 8),
}


def steps_of(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for x in batches:
        model.zero_grad()
        result = model(x)
        result.sum().backward()
        found += [result.detach(), *(parameter.grad for parameter in model.parameters())]
    return found


def compared(use: Use, batches: list[torch.Tensor]) -> remat.RematerializedModule:
    """Train with and without a budget, and compare every bit; types and shapes, too."""
    torch.manual_seed(0)
    model = Using(use)
    plain = copy.deepcopy(model)
    planned = remat.rematerialize(model, budget="1GiB", limit_seconds=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.BudgetWarning)
        got = steps_of(planned, batches)
    for one, other in zip(got, steps_of(plain, batches), strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    return planned


@pytest.mark.parametrize("use", NUMBERS.values(), ids=NUMBERS)
def test_numbers_are_part_of_one_graph(use: Use) -> None:
    planned = compared(use, [torch.randn(8, 8) for _ in range(2)])
    assert len(planned.plan.regions) == 1


@pytest.mark.parametrize("use", ARRAYS.values(), ids=ARRAYS)
def test_arrays_and_what_is_asked_of_numbers_are_numpys(use: Use) -> None:
    compared(use, [torch.randn(8, 8) for _ in range(2)])


@pytest.mark.parametrize("name", ["of a size", "of sizes"])
def test_sizes_that_change_are_traced_twice(name: str) -> None:
    counters.clear()
    compared(NUMBERS[name], [torch.randn(size, 8) for size in range(4, 10)])
    assert counters["frames"]["ok"] == 2


def test_a_number_that_changes_is_traced_twice() -> None:
    torch.manual_seed(0)
    model = Using(lambda m, x: x * m.scale)
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    planned = remat.rematerialize(model, budget="1GiB", limit_seconds=0.1)
    counters.clear()
    for step in range(6):
        for each in (planned, plain):
            each.scale = np.float64(1 / (step + 1))
        assert all(map(torch.equal, steps_of(planned, [x]), steps_of(plain, [x])))
    assert counters["frames"]["ok"] == 2
