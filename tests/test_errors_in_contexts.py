"""An operator that raises within a context of the forward leaves nothing of it in the process."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import remat

BF16 = torch.bfloat16


def scored(scores: Tensor, labels: Tensor) -> Tensor:
    """Raise where a label is none."""
    return nn.functional.cross_entropy(scores, labels)


def without_autocast(scores: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return scored(scores.float(), labels)


def within_autocast(scores: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return scored((scores @ scores.T @ scores).float(), labels)


def without_gradients(scores: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        scale = scored(scores, labels)
    return scored(scores * scale, labels)


def along_a_direction(scores: Tensor, labels: Tensor) -> Tensor:
    ones = torch.ones_like(scores)
    return torch.func.jvp(lambda each: scored(each, labels), (scores,), (ones,))[1]  # type: ignore[no-any-return]


def by_a_transform(scores: Tensor, labels: Tensor) -> Tensor:
    gradient = torch.func.grad(lambda each: scored(each, labels))(scores)
    return scored(scores + gradient, labels)


def at_a_dual_level(scores: Tensor, labels: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(scores, torch.ones_like(scores))
        return forward_ad.unpack_dual(scored(dual, labels)).primal


KINDS = [
    without_autocast, within_autocast, without_gradients, along_a_direction, by_a_transform,
    at_a_dual_level,
]  # fmt: skip


class Scores(nn.Module):
    """A loss that is computed within a context."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.layers(x)
        return self.loss(scores, labels) + scores.square().mean()


def modes() -> tuple[object, ...]:
    torch.autocast_increment_nesting()
    return (
        torch.autocast_decrement_nesting(),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        torch._C._is_fwd_grad_enabled(),
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),  # type: ignore[attr-defined]
    )


@pytest.fixture(autouse=True)
def _nothing_is_left_for_the_next_test() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    while torch.autocast_increment_nesting() > 1:
        torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
    torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


def train(model: Any, bad: int) -> list[Tensor]:
    """Skip a batch whose labels are none, as loops do."""
    found, numbers = [], torch.Generator().manual_seed(0)
    for step in range(3):
        x = torch.randn(32, 16, generator=numbers)
        labels = torch.randint(16, (32,), generator=numbers)
        if step == bad:
            labels[3] = 16
        model.zero_grad()
        with contextlib.suppress(IndexError), torch.autocast("cpu", dtype=BF16, cache_enabled=True):
            loss = model(x, labels)
            loss.backward()
            found += [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    return found


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch's own
@pytest.mark.parametrize(
    ("kind", "compiled", "bad"),
    [  # each kind at first, and in another way, in turn; the others in a sweep
        pytest.param(kind, compiled, bad, marks=() if way in (0, 1 + at % 2) else pytest.mark.sweep)
        for at, kind in enumerate(KINDS)
        for way, (compiled, bad) in enumerate([(False, 0), (True, 0), (False, 1), (True, 1)])
    ],
)
def test_a_batch_that_is_skipped_leaves_no_mode(kind: Any, compiled: bool, bad: int) -> None:
    torch.manual_seed(0)
    eager, before = Scores(kind), modes()
    model: Any = copy.deepcopy(eager)
    if compiled:
        model = torch.compile(model, backend="remat", options={"budget": 1.0})
    else:
        model = remat.rematerialize(model, budget=1.0)
    expected = train(eager, bad)
    found = train(model, bad)
    assert modes() == before
    forward_ad.exit_dual_level(level=forward_ad.enter_dual_level())  # none is open
    assert len(found) == len(expected) == 2 * (1 + 4)
    assert all(map(torch.equal, found, expected))
