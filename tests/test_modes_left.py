"""Modes of torch that a forward sets by calls hold behind a break of the graph, too."""

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import remat


class Setting(nn.Module):
    """Layers with a break, before which a mode is set; `mode` is what the code behind it sees."""

    def __init__(self, turn: Callable[[bool], None], mode: Callable[[], object]) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.turn, self.mode, self.seen = turn, mode, []

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x).tanh()
        self.turn(True)
        x = kept.sin()
        torch._dynamo.graph_break()
        x = self.second(x).float()
        self.seen.append(self.mode())
        self.turn(False)
        loss: Tensor = self.last(kept * x).square().mean()
        return loss


MODES = {
    "no gradients": (lambda on: torch.set_grad_enabled(not on), torch.is_grad_enabled),
    "deterministic": (
        lambda on: torch.use_deterministic_algorithms(on),
        torch.are_deterministic_algorithms_enabled,
    ),
    "a default type": (
        lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32),
        torch.get_default_dtype,
    ),
    "the precision of products": (
        lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
        torch.get_float32_matmul_precision,
    ),
}


@pytest.fixture(autouse=True)
def _modes_are_restored() -> Iterator[None]:
    yield
    for turn, _ in MODES.values():
        turn(False)
    torch.set_autocast_enabled("cpu", False)


@pytest.mark.parametrize("name", MODES)
def test_the_code_behind_a_break_has_the_mode_that_was_set_before(name: str) -> None:
    torch.manual_seed(0)
    eager = Setting(*MODES[name])
    model = copy.deepcopy(eager)
    run = remat.rematerialize(model, budget=2**24, limit_seconds=0.1)
    for _ in range(3):
        x, grads = torch.randn(4, 8), []
        for each in (eager, run):
            each.zero_grad()
            each(x).backward()
            grads.append([parameter.grad for parameter in each.parameters()])
        torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert run.seen == eager.seen


def test_a_forward_that_sets_autocast_by_a_call_is_refused_with_what_to_write() -> None:
    turn = functools.partial(torch.set_autocast_enabled, "cpu")
    run = remat.rematerialize(Setting(turn, lambda: None), budget=2**24)
    with pytest.raises(remat.RematError, match="use `with torch"):
        run(torch.randn(4, 8))
