"""What grows by each step: what hooks and forwards collect in lists, and count in globals."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from integration_cases.sweeps import swept
from torch import Tensor, nn

import remat
from remat.dynamo import frames

WIDTH, STEPS = 32, 9
calls, seen_by_name = 0, {"rows": 0}


class Collecting(nn.Module):
    """A model that keeps what it has seen, in lists that nobody empties."""

    run: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.kept: list[Any] = []
        self.by_name: dict[str, list[Any]] = {"loss": [], "rows": []}
        self.steps = 0
        self.made: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        loss: Tensor = self.last(self.run(self.first(x).tanh())).square().mean()
        return loss


def tensors(model: Collecting, x: Tensor) -> Tensor:
    model.kept.append(x.detach().mean())
    return x


def what_is_differentiated(model: Collecting, x: Tensor) -> Tensor:
    x = x.sin()
    model.kept.append(x)
    return x


def numbers(model: Collecting, x: Tensor) -> Tensor:
    model.kept.append(model.steps)
    model.by_name["rows"].append(x.shape[0])
    return x


def behind_a_break(model: Collecting, x: Tensor) -> Tensor:
    model.kept.append(x.mean().item())
    return x


def twice(model: Collecting, x: Tensor) -> Tensor:
    same = model.kept
    same.append("first")
    model.kept.append(x.sum())
    return x


def what_is_there(model: Collecting, x: Tensor) -> Tensor:
    model.kept.append(model.by_name)
    model.kept.append(model.first.weight)
    return x


def several(model: Collecting, x: Tensor) -> Tensor:
    model.kept.extend([x.detach().mean(), "and"])
    model.kept += (x.detach().sum(), [model.steps])
    return x


def what_is_made(model: Collecting, x: Tensor) -> Tensor:
    made = {"mean": x.detach().mean()}
    model.kept.append(made)
    model.by_name["loss"].append((made, [x.detach().sum()]))
    made["more"] = x.detach().sum()
    model.made = made
    return x


COLLECTED = (
    tensors, what_is_differentiated, numbers, behind_a_break, twice, what_is_there, several,
    what_is_made,
)  # fmt: skip


def how_many(model: Collecting, x: Tensor) -> Tensor:
    model.kept.append(x.mean())
    return x * len(model.kept)


def the_last(model: Collecting, x: Tensor) -> Tensor:
    before = model.kept[-1] if model.kept else x.detach()
    model.kept.append(x.detach())
    return x + before


def all_of_them(model: Collecting, x: Tensor) -> Tensor:
    model.kept.append(x.detach().mean())
    return x * torch.stack(model.kept).sum()


def whether_there_are_some(model: Collecting, x: Tensor) -> Tensor:
    model.kept.append(x.detach())
    return x * 2 if model.kept else x


def by_another_name(model: Collecting, x: Tensor) -> Tensor:
    model.by_name["loss"] = model.kept
    model.kept.append(x.detach().mean())
    return x * len(model.by_name["loss"])


def behind_a_break_how_many(model: Collecting, x: Tensor) -> Tensor:
    model.kept.append(x.detach().mean())
    torch._dynamo.graph_break()
    return x * len(model.kept)


READ = (
    how_many, the_last, all_of_them, whether_there_are_some, by_another_name,
    behind_a_break_how_many,
)  # fmt: skip


@contextmanager
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Give the names of the frames that are compiled."""
    found, compiled = list[str](), frames._Frames._compiled

    def counting(self: Any, frame: Any, *rest: Any) -> Any:
        found.append(frame.f_code.co_name)
        return compiled(self, frame, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(frames._Frames, "_compiled", counting)
        yield found


def plain(value: Any) -> Any:
    """Give what is comparable of what was kept."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def step(model: Any, at: int) -> list[Any]:
    model.zero_grad()
    torch.manual_seed(at)
    loss = model(torch.randn(64, WIDTH))
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def pair(run: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    eager = type("Running", (Collecting,), {"run": run})()
    made = remat.rematerialize(copy.deepcopy(eager), budget="1GiB", limit_seconds=0.1)
    return eager, made


def assert_alike(eager: Any, made: Any, at: int) -> None:
    torch.testing.assert_close(step(eager, at), step(made, at), rtol=0, atol=0)
    assert plain(eager.kept) == plain(made.kept)
    assert plain(eager.by_name) == plain(made.by_name)
    assert made.made is None or made.kept[-1] is made.made is made.by_name["loss"][-1][0]


@pytest.mark.parametrize("run", swept(COLLECTED, [behind_a_break, what_is_made]))
def test_what_is_appended_to_a_list_that_grows_is_traced_no_more(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, made = pair(run)
    for at in range(STEPS):
        with traced(monkeypatch) as names:
            assert_alike(eager, made, at)
        assert not names or at < 7
    assert len(made.kept) >= STEPS


@pytest.mark.parametrize("run", swept(READ, [how_many, by_another_name]))
def test_what_is_read_of_a_list_that_grows_is_what_it_has(run: Any) -> None:
    eager, made = pair(run)
    for at in range(6):
        assert_alike(eager, made, at)


def test_a_list_that_grew_may_be_emptied_or_another() -> None:
    eager, made = pair(tensors)
    for at in range(12):
        for model in (eager, made):
            if at == 6:
                model.kept.clear()
            elif at == 8:
                model.kept = ["another"]
            elif at == 10:
                model.kept = model.by_name["loss"]
        assert_alike(eager, made, at)
    for model in (eager, made):
        model.kept = ("no list",)
        with pytest.raises(AttributeError, match="append"):
            step(model, 0)


def test_hooks_that_collect_into_one_list_are_traced_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    seen: list[list[Any]] = []
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        kept: list[Any] = []
        for layer in model:
            layer.register_forward_hook(
                lambda _, __, output, kept=kept: kept.append(output.detach().mean())
            )
        seen.append(kept)
        models.append(model)
    eager, made = models[0], remat.rematerialize(models[1], budget="1GiB", limit_seconds=0.1)
    for at in range(STEPS):
        with traced(monkeypatch) as names:
            for model in (eager, made):
                torch.manual_seed(at)
                model(torch.randn(64, WIDTH)).sum().backward()
        assert not names or at < 7
    assert plain(seen[0]) == plain(seen[1])
    assert len(seen[1]) == 3 * STEPS


def in_globals(model: Collecting, x: Tensor) -> Tensor:
    global calls  # noqa: PLW0603 - as scripts do
    calls += 1
    seen_by_name["rows"] += x.shape[0]
    model.by_name["rows"].append((calls, seen_by_name["rows"]))
    return x * (calls % 2)


def test_what_is_counted_in_globals_is_traced_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for model in pair(in_globals):
        monkeypatch.setattr(sys.modules[__name__], "calls", 0)
        monkeypatch.setitem(seen_by_name, "rows", 0)
        steps = []
        for at in range(STEPS):
            with traced(monkeypatch) as names:
                steps.append(step(model, at))
            assert not names or at < 7
        found.append((steps, calls, model.by_name["rows"]))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert calls == STEPS
