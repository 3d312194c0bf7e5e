"""Plan files of graphs that come after others, which are of what a model does only at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integration_cases.sweeps import swept
from torch import Tensor, nn

import remat
from remat.planning import solving
from remat.session import kind_finder

WIDTH = 64


class Layers(nn.Module):
    """Three layers, and what differs from step to step."""

    mean: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 4 * WIDTH)
        self.last = nn.Linear(4 * WIDTH, 1)
        self.mean, self.heat = None, 1.0

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.between(self.first(x).tanh())
        loss: Tensor = self.last(self.second(hidden).relu().exp().tanh()).square().mean()
        return loss


class Averaged(Layers):
    def between(self, hidden: Tensor) -> Tensor:
        now = hidden.mean(0).detach()
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return hidden - self.mean


class Cooling(Layers):
    def between(self, hidden: Tensor) -> Tensor:
        self.heat *= 0.99
        return hidden / self.heat


class Broken(Averaged):
    def between(self, hidden: Tensor) -> Tensor:
        hidden = super().between(hidden)
        torch._dynamo.graph_break()
        return hidden.sin()


class Resized(Layers):
    """Its first batch is larger than those that follow."""


def train(model: Any, rows: int = 256) -> list[Tensor]:
    found = []
    for at in range(5):
        torch.manual_seed(at)
        model.zero_grad()
        larger = isinstance(model, Resized) and at == 0
        loss = model(torch.randn(2 * rows if larger else rows, WIDTH))
        loss.backward()
        found += [loss.detach(), *(each.grad.clone() for each in model.parameters())]
    return found


def seeded(kind: type[Layers]) -> Layers:
    torch.manual_seed(0)
    return kind()


def save(kind: type[Layers], path: Path) -> Any:
    model = remat.rematerialize(
        seeded(kind), budget=0.9 if kind is Broken else 0.75, limit_seconds=0.1
    )
    train(model)
    model.plan.save(path)
    return model.plan


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give a list of what is solved anew from now on."""
    found = list[str]()
    for module, name in ((solving, "solve"), (kind_finder, "region_front")):
        original = getattr(module, name)

        def noting(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            found.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, noting)
    return found


@pytest.mark.parametrize("kind", swept([Averaged, Cooling, Broken, Resized], [Cooling, Broken]))
def test_a_plan_waits_for_its_graph(kind: type[Layers], tmp_path: Path, solved: list[str]) -> None:
    plan = save(kind, tmp_path / "plan.json")
    assert plan.earlier
    solved.clear()
    model: Any = remat.rematerialize(seeded(kind), plan=tmp_path / "plan.json", limit_seconds=0.1)
    for one, other in zip(train(seeded(kind)), train(model), strict=True):
        assert torch.equal(one, other)
    assert len(solved) == 1  # for what comes first alone
    assert [len(each.schedule) for each in model.plan.options] == [
        len(each.schedule) for each in plan.options
    ]
    model.plan.save(tmp_path / "again.json")
    assert remat.Plan.load(tmp_path / "again.json").earlier == plan.earlier


@pytest.mark.parametrize("kind", [Averaged, Broken])
def test_what_a_plan_does_not_name_is_refused_at_once(kind: type[Layers], tmp_path: Path) -> None:
    save(kind, tmp_path / "plan.json")
    model = remat.rematerialize(seeded(Layers), plan=tmp_path / "plan.json", limit_seconds=0.1)
    with pytest.raises(remat.PlanMismatch, match=r"another graph|has no plan"):
        train(model)


def test_an_earlier_graph_that_has_no_room_is_named_as_one(tmp_path: Path) -> None:
    class Shrinking(Resized):
        """Its first batch is much larger."""

    save(Shrinking, tmp_path / "plan.json")
    model = remat.rematerialize(
        seeded(Shrinking), plan=tmp_path / "plan.json", budget="200KiB", limit_seconds=0.1
    )
    with pytest.raises(remat.BudgetTooSmall) as refused:
        train(model)
    assert any("comes before that of" in note for note in refused.value.__notes__)
