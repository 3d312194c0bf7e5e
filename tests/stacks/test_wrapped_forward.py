"""Wrappers of `forward` on the instance, hooks within, parametrizations, a way back to the root."""

import functools
import gc
import weakref

import pytest
import torch
from exec_cases.training import assert_bitwise_equal
from stack_cases.models import assert_planned, record, rematerialized
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import remat
from loop_cases.models import Blocks, batch, made, square


def wrap(model, calls):
    """Set a wrapper on the instance, as several libraries do."""
    forward = model.forward

    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        calls.append("called")
        return forward(*args, **kwargs) * 2

    model.forward = wrapper
    return model


@pytest.mark.parametrize(
    ("planned_first", "times"), [(True, 2), pytest.param(False, 1, marks=pytest.mark.sweep)]
)
def test_a_wrapper_set_on_the_instance(planned_first, times):
    model, eager, calls = made(Blocks), made(Blocks), []
    if planned_first:
        model = rematerialized(model)
    for _ in range(times):
        wrap(model, calls)
        wrap(eager, [])
    if not planned_first:
        model = rematerialized(model)
    assert_bitwise_equal(record(model), record(eager))
    assert_planned(model)
    assert len(calls) == 3 * times


@pytest.mark.sweep
def test_a_wrapper_of_an_inner_forward():
    model, eager, calls = made(Blocks), made(Blocks), []
    wrap(model.layers[1], calls)
    wrap(eager.layers[1], [])
    model = rematerialized(model)
    assert_bitwise_equal(record(model), record(eager))
    assert_planned(model)
    assert len(calls) == 3


@pytest.mark.sweep
@pytest.mark.parametrize("example", [True, False])
def test_hooks_of_inner_modules_run_once_a_step(example):
    def hooked(model):
        calls = []
        model.layers[0].register_forward_pre_hook(lambda m, args: calls.append("before"))
        model.layers[1].register_forward_hook(lambda m, args, output: calls.append("after"))
        model.layers[2].enter.register_forward_hook(lambda m, args, output: output * 2)
        return model, calls

    (model, calls), (eager, expected) = hooked(made(Blocks)), hooked(made(Blocks))
    model = rematerialized(model, *([batch()] if example else []))
    calls.clear()  # an example may have been run
    assert_bitwise_equal(record(model), record(eager))
    assert_planned(model)
    assert calls == expected == ["before", "after"] * 3


@pytest.mark.sweep
def test_a_hook_that_keeps_what_it_sees():
    """Features of a layer inside, read after the step."""
    kept = {}
    models = {"remat": made(Blocks), "plain": made(Blocks)}
    for name, model in models.items():
        model.layers[1].register_forward_hook(
            lambda m, args, output, name=name: kept.__setitem__(name, output.detach().clone())
        )
    models["remat"] = rematerialized(models["remat"])
    for step in range(3):
        for model in models.values():
            torch.manual_seed(step)
            square(model(batch(step))).backward()
        assert torch.equal(kept["remat"], kept["plain"])
    assert_planned(models["remat"])


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["parametrize", "weight_norm", "spectral_norm"])
def test_parametrizations(kind):
    def dressed():
        model = made(Blocks)
        torch.manual_seed(0)
        for layer in model.layers:
            if kind == "parametrize":
                parametrize.register_parametrization(layer.enter, "weight", Doubled())
            else:
                getattr(parametrizations, kind)(layer.enter)
        return model

    model = rematerialized(dressed(), budget=0.8)
    assert_bitwise_equal(record(model), record(dressed()))
    assert_planned(model)


class Child(nn.Module):
    def __init__(self, parent, reads):
        super().__init__()
        self.__dict__["parent"] = weakref.proxy(parent)  # set otherwise, it would be a submodule
        self.reads = reads
        self.block = Blocks()

    def forward(self, x):
        return self.block(x) * (self.parent.scale if self.reads else 2.0)


class Parent(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.scale = 2.0
        self.child = Child(self, reads)

    def forward(self, x):
        return self.child(x)


def test_a_weak_way_back_to_the_root_from_a_submodule():
    """The original is held by nobody else here."""
    model = rematerialized(made(Parent, False))
    gc.collect()
    eager = made(Parent, False)
    assert_bitwise_equal(record(model), record(eager))
    assert_planned(model)


def test_what_is_read_through_a_weak_proxy_is_refused():
    """TorchDynamo cannot see it change."""
    model = rematerialized(made(Parent, True))
    with pytest.raises(remat.RematError, match="weakref"):
        record(model)
