"""The benchmark on the networks of MONeT's paper: its networks, what it plans, and its bars."""

import pytest
import torch

import monet
from remat_graph import Numerics, simulate
from remat_graph.torch import capture
from remat_solvers import store_all


def row(**overheads):
    methods = {
        method: {"overhead": overhead, "seconds": 1.0, "peak_bytes": 1}
        for method, overhead in overheads.items()
    }
    return {"table": "paper", "model": "unet", "number": 0, "published_overhead": 5.0} | {
        "methods": methods
    }


def test_bars_tell_what_is_above(capsys):
    fine = row(ours=0.02, monet=0.03, checkpointing=0.04)
    slow = row(ours=0.06, monet=0.03, checkpointing=0.06) | {"model": "vgg-16"}
    none = row(ours=None, monet=None, checkpointing=0.04) | {"model": "gpt-2"}
    assert monet.print_bars([fine]) == []
    assert monet.print_bars([fine, slow, none]) == ["paper vgg-16 0", "paper gpt-2 0"]
    told = capsys.readouterr().out
    assert "ours no higher than monet: 1 of 2; not paper vgg-16 0\n" in told
    assert "ours no higher than published: 1 of 3; not paper vgg-16 0, paper gpt-2 0\n" in told


@pytest.mark.parametrize("name", ["googlenet", "vgg-16", "mobilenet-v2"])
def test_networks_train(name):
    torch.manual_seed(0)
    example = monet.NETWORKS[name].quick()
    assert torch.isfinite(example.step())
    assert all(parameter.grad is not None for parameter in example.model.parameters())


def test_makers_of_least_memory_are_fixed_before_anything_is_scheduled():
    example = monet.NETWORKS["vgg-16"].quick()
    captured = capture(example.model, example.args, {}, costs=monet.P100)
    graph = captured.with_alternatives(Numerics.BITWISE).graph
    fixed = monet.least_operators(graph).wiring.graph
    assert not fixed.has_alternatives
    least, plain = (simulate(g, store_all(g)).peak_bytes for g in (fixed, captured.graph))
    assert least < plain
