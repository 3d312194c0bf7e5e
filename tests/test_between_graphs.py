"""What runs as it is, since in a graph it would be something else: by eager's bits, and told of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import remat
from remat_exec import DeferredTensor

WIDTH, ROWS = 64, 256


def trained(model: Any, run: Any = None, steps: int = 4, **call: Any) -> list[Any]:
    """Train; give losses, gradients, buffers and what the generator draws next."""
    torch.manual_seed(1)
    found: list[Any] = []
    for at in range(steps):
        model.zero_grad()
        args = {name: given(at) for name, given in call.items()}
        loss = (run or model)(torch.randn(ROWS, WIDTH), **args).square().mean()
        loss.backward()
        found += [loss.detach(), *(copy.copy(p.grad) for p in model.parameters())]
        found += [buffer.clone() for buffer in model.buffers()]
    return [*found, torch.rand(2)]


def assert_trained_alike(plain: nn.Module, model: Any, **call: Any) -> None:
    for one, other in zip(trained(plain, **call), trained(model, **call), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize(
    ("budget", "has_example"),
    [
        (0.7, False),
        ("1GiB", True),
        pytest.param("1GiB", False, marks=pytest.mark.sweep),
        pytest.param(0.7, True, marks=pytest.mark.sweep),
    ],
)
def test_lazy_modules_draw_their_parameters_where_eager_does(
    budget: Any, has_example: bool
) -> None:
    def lazy() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH),
            nn.GELU(), nn.LazyLinear(8),
        )  # fmt: skip

    example = (torch.ones(ROWS, WIDTH),) if has_example else None
    options = {"budget": budget, "limit_seconds": 0.1}
    assert_trained_alike(lazy(), remat.rematerialize(lazy(), example, **options))


class Pair(torch.autograd.Function):
    """Gives a gradient to the weight only if one of its first output comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return x * weight, x + 1

    @staticmethod
    def backward(ctx: Any, of_first: Tensor | None, of_second: Tensor | None) -> Any:
        x, weight = ctx.saved_tensors
        if of_first is None:
            return of_second, None
        of_x = of_first * weight
        return of_x if of_second is None else of_x + of_second, (of_first * x).sum(0)


class OfPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, reads_both: bool) -> Tensor:
        first, second = Pair.apply(self.layer(x).tanh(), self.weight)
        found: Tensor = self.layer(second + first if reads_both else second).tanh()
        return found


def test_a_function_that_asks_for_no_zeros_gets_none() -> None:
    torch.manual_seed(0)
    plain = OfPair()
    model = remat.rematerialize(copy.deepcopy(plain), budget="1GiB", limit_seconds=0.1)
    assert_trained_alike(plain, model, reads_both=lambda at: at == 0)
    assert plain.weight.grad is None  # else nothing was tried


def test_a_function_of_one_output_that_asks_for_no_zeros_is_in_a_graph() -> None:
    class One(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.set_materialize_grads(False)
            return x.exp()

        @staticmethod
        def backward(_: Any, of_result: Tensor) -> Tensor:
            return 2 * of_result

    class OfOne(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = One.apply(super().forward(x))
            return found

    plain = OfOne(WIDTH, WIDTH)
    model = remat.rematerialize(copy.deepcopy(plain), budget="1GiB", limit_seconds=0.1)
    assert_trained_alike(plain, model)
    assert model.plan.is_one_region


@pytest.mark.parametrize("regions", [None, "0"])
def test_a_step_beneath_a_dispatch_mode_runs_as_it_is(regions: str | None) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    plain = nn.Sequential(nn.Sequential(*layers), nn.Linear(WIDTH, 1))
    model = remat.rematerialize(
        copy.deepcopy(plain), budget=0.9, regions=regions, limit_seconds=0.1,
        on_infeasible="plain",
    )  # fmt: skip
    counted = []
    for at in range(6):
        if at in (0, 4):
            told = pytest.warns(remat.BudgetWarning, match="FlopCounterMode is on")
            with told, FlopCounterMode(display=False) as mode:
                found = trained(model, steps=1)
            counted.append(mode.get_total_flops())
            with FlopCounterMode(display=False) as mode:
                expected = trained(plain, steps=1)
            counted.append(mode.get_total_flops())
        else:
            found, expected = trained(model, steps=1), trained(plain, steps=1)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(set(counted)) == 1


class Asking(nn.Linear):
    """Asks whether it is given a tensor."""

    def forward(self, x: Tensor, given: Any) -> Tensor:
        x = super().forward(x).tanh()
        return x * given if torch.is_tensor(given) else x * 100


def test_a_stand_in_for_an_output_is_a_tensor_where_a_model_is_given_one() -> None:
    plain, x = Asking(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    model = remat.rematerialize(copy.deepcopy(plain), budget="1GiB", limit_seconds=0.1)
    meta, given = torch.empty(ROWS, WIDTH, device="meta"), torch.randn(ROWS, WIDTH)
    for _ in range(3):
        stand_in = DeferredTensor.like(meta, torch.device("cpu"), lambda: given)
        assert torch.equal(model(x, stand_in), plain(x, given))
        assert torch.equal(model(x, given), plain(x, given))
