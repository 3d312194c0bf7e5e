"""What a forward prints, logs and warns of, in its own code and in what it calls."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import remat

WIDTH = 16
logger = logging.getLogger(__name__)


def tell(what: str, x: Tensor) -> None:
    value = x.detach().sum().round()
    if what == "numbers":
        print("rows", x.shape[0])  # noqa: T201
    elif what == "tensors":
        print("sum", value, f"of {value}")  # noqa: T201
    elif what == "logs":
        logger.warning("rows %s, sum %s", x.shape[0], value)
    else:
        warnings.warn("look here", stacklevel=1)


class Called(nn.Linear):
    what = ""

    def forward(self, x: Tensor) -> Tensor:
        tell(self.what, x)
        return super().forward(x).tanh()


class Caller(nn.Module):
    def __init__(self, what: str, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.called, self.last = Called(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.called.what, self.what, self.checkpointed = what, what, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        tell(self.what, x)
        run = self.called
        x = checkpoint(run, x, use_reentrant=False) if self.checkpointed else run(x)
        loss: Tensor = self.last(x).sum()
        return loss


def told(model: Any, capsys: Any, caplog: Any, steps: int = 3) -> list[Any]:
    found: list[Any] = []
    for at in range(steps):
        capsys.readouterr()
        caplog.clear()
        torch.manual_seed(at)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model(torch.randn(8, WIDTH)).backward()
        logged = [each.getMessage() for each in caplog.records if each.name == __name__]
        found.append((capsys.readouterr().out, logged, [str(each.message) for each in warned]))
    return found


@pytest.mark.parametrize(
    ("what", "hooked"),
    [
        pytest.param(
            what, hooked, marks=() if hooked == (at % 2 == 1) else pytest.mark.sweep,
            id=f"{what} in a {'hook' if hooked else 'part'}",
        )
        for at, what in enumerate(["numbers", "tensors", "logs", "warnings"])
        for hooked in (False, True)
    ],
)  # fmt: skip
def test_what_is_told_in_what_the_forward_calls_is_told(
    what: str, hooked: bool, capsys: Any, caplog: Any
) -> None:
    plain = Caller(what)
    if hooked:
        plain.called.what = ""
        plain.last.register_forward_hook(lambda _, args, __: tell(what, args[0]))
    model = remat.rematerialize(copy.deepcopy(plain), budget="1GiB", limit_seconds=0.1)
    expected = told(plain, capsys, caplog)
    assert told(model, capsys, caplog) == expected
    assert any(map(any, expected))
    assert len(model.plan.calls) == 1


@pytest.mark.parametrize("what", ["numbers", "tensors"])
def test_what_is_told_in_a_checkpoint_is_told_once_or_breaks_the_graph(
    what: str, capsys: Any, caplog: Any
) -> None:
    plain = Caller(what, checkpointed=True)
    model = remat.rematerialize(copy.deepcopy(plain), budget="1GiB", limit_seconds=0.1)
    for (here, *_), (there, *_) in zip(
        told(model, capsys, caplog), told(plain, capsys, caplog), strict=True
    ):
        lines = there.splitlines()  # eager runs the checkpoint twice
        assert here.splitlines() == (lines[:2] if what == "numbers" else lines)
