"""Graph breaks in a loop over modules, behind which tracing goes on."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from integration_cases.sweeps import swept
from torch import Tensor, nn

import remat
from remat_exec import measure_peak

WIDTH, LAYERS, BROKEN = 32, 6, 3


class Layer(nn.Module):
    """A layer that may read a number of what it computes, which breaks the graph."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.reads, self.read = reads, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x)).tanh()
        if self.reads:
            self.read.append(x.sum().item())
        return nn.functional.gelu(x) + x


class Looping(nn.Module):
    """A model that runs its layers in `run`, with work before and behind them."""

    run: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(at == BROKEN) for at in range(LAYERS))
        self.broken = Layer(True)
        self.named = nn.ModuleDict({f"n{at}": Layer(False) for at in range(LAYERS)})

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.run(x.sin() + x) * 2).square().mean()
        return loss


def over_a_list(model: Looping, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def enumerated(model: Looping, x: Tensor) -> Tensor:
    for at, layer in enumerate(model.layers, 1):
        x = layer(x) * at
    return x


def zipped(model: Looping, x: Tensor) -> Tensor:
    states = []
    for scale, layer, (name, other) in zip(
        range(9), model.layers, model.named.items(), strict=False
    ):
        x = other(layer(x)) * scale + len(name) + x
        states.append(x)
    return torch.stack(states).mean(0)


def over_values(model: Looping, x: Tensor) -> Tensor:
    model.named["n2"].reads = True
    for layer in model.named.values():
        x = layer(x)
    return x


def nested(model: Looping, x: Tensor) -> Tensor:
    for some in (model.layers[:2], model.layers[2:]):
        for layer in some:
            x = layer(x)
    return x


def left_early(model: Looping, x: Tensor) -> Tensor:
    for at, layer in enumerate(model.layers):
        if at == 1:
            continue
        x = layer(x)
        if at == LAYERS - 2:
            break
    else:
        x = x * 100
    return x


def ended_by_else(model: Looping, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
        if not model.layers:
            break
    else:
        x = x * 3
    return x


def decided_by_data(model: Looping, x: Tensor) -> Tensor:
    for layer in model.named.values():
        x = layer(x)
        if x.mean() > 0:
            x = x - x.mean()
    return x


def every_layer(model: Looping, x: Tensor) -> Tensor:
    for layer in model.layers:
        layer.reads = True
        x = layer(x)
    return x


def within_autocast(model: Looping, x: Tensor) -> Tensor:
    for layer in model.layers:
        with torch.autocast("cpu", torch.bfloat16, enabled=x.shape[0] > 2):
            x = layer(x)
    return x.float()


def read_on_elsewhere(model: Looping, x: Tensor) -> Tensor:
    left = enumerate(model.layers)
    for at, layer in left:
        x = layer(x)
        if at == BROKEN:
            break
    for at, layer in left:
        x = layer(x) * at
    return x


def read_on_within(model: Looping, x: Tensor) -> Tensor:
    left = iter(model.layers)
    for layer in left:
        x = layer(x) + next(left)(x) * 2
    return x


def zipped_with_what_is_read_on(model: Looping, x: Tensor) -> Tensor:
    numbers = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    for layer, scale in zip(model.layers, numbers, strict=False):
        x = layer(x) * scale
        if scale == BROKEN + 2:
            break
    return x * next(numbers)


def by_position(model: Looping, x: Tensor) -> Tensor:
    for at in range(LAYERS):
        x = model.layers[at](x)
    return x


def by_name(model: Looping, x: Tensor) -> Tensor:
    model.named["n2"].reads = True
    for name in model.named:
        x = model.named[name](x)
    return x


def in_time(model: Looping, x: Tensor) -> Tensor:
    for at in range(2):
        x = model.broken(x * (at + 1))
    return x


def while_some_are_left(model: Looping, x: Tensor) -> Tensor:
    at = 0
    while at < LAYERS:
        x, at = model.layers[at](x), at + 1
    return x


def with_an_outer_loop(model: Looping, x: Tensor) -> Tensor:
    for scale in (1.0, 2.0):
        for layer in model.layers:
            x = layer(x) * scale
    return x


def over_what_grows(model: Looping, x: Tensor) -> Tensor:
    left = [model.layers[BROKEN]]
    for layer in left:
        x = layer(x) * 2
        if len(left) < 3:
            left.append(model.layers[len(left)])
    return x


def over_values_that_change(model: Looping, x: Tensor) -> Tensor:
    states = {"a": x, "b": x + 1, "c": x - 1}
    for name, state in states.items():
        if name != "c":
            states["c"] = states["c"] * 2 + state
        x = x + model.broken(state)
    for layer in model.layers:
        x = layer(x)
    return x


def zipped_with_what_is_taken(model: Looping, x: Tensor) -> Tensor:
    model.layers[1].reads = True
    skips = [x, x + 1, x + 2, x + 3, x + 4, x + 5]
    for layer, skip in zip(model.layers, skips, strict=False):
        x = layer(x) + skip * 0.1
        x = x + skips.pop()
    return x


class Drawing:
    """Draws a number when it is asked for."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Tensor:
        return torch.rand(())


def zipped_with_draws(model: Looping, x: Tensor) -> Tensor:
    for layer, scale in zip(model.layers, Drawing(), strict=False):
        x = nn.functional.dropout(layer(x), 0.5) * scale
    return x


GOES_ON: dict[Any, int] = {  # in how many calls of regions; else one for each layer, or more
    over_a_list: 5,
    enumerated: 5,
    zipped: 5,
    over_values: 5,
    left_early: 5,
    ended_by_else: 5,
    every_layer: 13,  # of which the last run as they are
    within_autocast: 5,
    by_position: 5,
    by_name: 5,
    with_an_outer_loop: 8,
}
AS_IT_IS = (
    read_on_elsewhere, read_on_within, zipped_with_what_is_read_on, while_some_are_left, in_time,
    decided_by_data, over_what_grows, over_values_that_change, zipped_with_what_is_taken,
    zipped_with_draws, nested,
)  # fmt: skip


def assert_trained_as_in_eager(eager: nn.Module, run: nn.Module, rows: tuple[int, ...]) -> None:
    for at, size in enumerate(rows):
        found = []
        for model in (eager, run):
            model.zero_grad()
            torch.manual_seed(at)
            loss = model(torch.randn(size, WIDTH)).mean()
            loss.backward()
            grads = [parameter.grad for parameter in model.parameters()]
            read = [part.read for part in model.modules() if isinstance(part, Layer)]
            found.append((loss.detach(), copy.deepcopy(grads), read))
        torch.testing.assert_close(*found, rtol=0, atol=0)


def trained(call: Any, rows: tuple[int, ...] = (16, 16, 12)) -> Any:
    torch.manual_seed(0)
    eager = type("Running", (Looping,), {"run": call})()  # a method, as TorchDynamo sees it
    run = remat.rematerialize(copy.deepcopy(eager), budget=2**24, limit_seconds=0.1)
    assert_trained_as_in_eager(eager, run, rows)
    return run


@pytest.mark.parametrize("call", swept(GOES_ON, [left_early]))
def test_what_is_left_of_a_loop_is_traced_behind_a_break(call: Any) -> None:
    assert len(trained(call).plan.calls) == GOES_ON[call]


@pytest.mark.parametrize("call", swept(AS_IT_IS, [zipped_with_what_is_taken]))
def test_loops_of_other_kinds_stay_as_they_are(call: Any) -> None:
    assert len(trained(call).plan.calls) >= 4


def hooked(layers: int = LAYERS) -> nn.Sequential:
    """Give a stack in which a hook reads a number of one layer."""
    parts = [(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.GELU()) for _ in range(layers)]
    net = nn.Sequential(*(each for part in parts for each in part))
    net[9].register_forward_hook(lambda _, __, output: output.mean().item() and None)
    return nn.Sequential(net, nn.Linear(256, 1))


def test_a_stack_with_one_hook_is_planned_within_a_budget() -> None:
    torch.manual_seed(0)
    eager, x = hooked(), torch.randn(512, 256)
    run = remat.rematerialize(copy.deepcopy(eager), budget=0.6)
    peaks = []
    for _ in range(3):
        for model in (eager, run):
            model.zero_grad()
            with measure_peak() as peak:
                model(x).mean().backward()
            peaks.append(peak.peak_bytes)
        for one, other in zip(eager.parameters(), run.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    assert len(run.plan.calls) <= 6
    assert peaks[-1] <= 0.6 * peaks[-2]


def test_stacks_that_run_the_same_code_have_loops_of_their_own() -> None:
    torch.manual_seed(0)

    def stack(*names: str) -> nn.Sequential:
        return nn.Sequential(OrderedDict({name: parts[name] for name in names}))

    parts = {"a": Layer(True), "b": Layer(False), "c": nn.Tanh(), "d": Layer(False)}
    eager = nn.Sequential(stack("a", "b", "c"), stack("b", "a", "c"), stack("a", "b", "c", "d"))
    run = remat.rematerialize(copy.deepcopy(eager), budget=2**24, limit_seconds=0.1)
    first = [net[0] for net in (eager, run)]
    assert_trained_as_in_eager(eager, run, (16, 16))
    for net in first:  # another order, then one more, then one in place of another
        net._modules["a"] = net._modules.pop("a")
    assert_trained_as_in_eager(eager, run, (16, 16))
    added, put = Layer(False), Layer(True)
    for net in first:
        net.append(copy.deepcopy(added))
    assert_trained_as_in_eager(eager, run, (16, 16))
    for net in first:
        net[1] = copy.deepcopy(put)
    assert_trained_as_in_eager(eager, run, (16, 16))


def test_what_a_long_loop_has_left_stays_as_it_is() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Sequential(*(Layer(at == 2) for at in range(80))))
    run = remat.rematerialize(copy.deepcopy(eager), budget=2**24, limit_seconds=0.1)
    assert_trained_as_in_eager(eager, run, (8, 8))
    assert len(run.plan.calls) > 80


def test_a_module_that_is_replaced_while_a_loop_goes_on_is_told_of() -> None:
    class Replacing(Looping):
        def run(self, x: Tensor) -> Tensor:
            for at, layer in enumerate(self.layers):
                x = layer(x)
                if at == BROKEN:
                    self.layers[BROKEN + 1] = Layer(False)
            return x

    run = remat.rematerialize(Replacing(), budget=2**24, limit_seconds=0.1)
    with pytest.raises(remat.RematError, match="changes a list or dict of modules"):
        run(torch.randn(16, WIDTH))
