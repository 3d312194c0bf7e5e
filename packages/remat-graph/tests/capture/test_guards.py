"""Every change that would make a captured graph wrong is noticed, and nothing else is."""

import copy

import pytest
import torch
from torch import nn

from remat_graph.torch import ModuleState, read_call


class Config:
    def __init__(self):
        self.scale = 2.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.enter.weight
        self.scale = 1.0
        self.mask = torch.ones(4)
        self.config = Config()
        self.sizes = [1, 2]
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return self.tied(self.body(self.enter(x)))


def call(*args, **kwargs):
    return read_call(args, kwargs).signature


X = torch.rand(3, 4)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            call(torch.rand(5, 4), 1, flag=True),
            r"tensor argument \[0\]\[0\] was \[3, 4\].*\[5, 4\]",
        ),
        (call(X.double(), 1, flag=True), "float32.*float64"),
        (call(torch.rand(4, 3).t(), 1, flag=True), r"strides \[4, 1\].*strides \[1, 3\]"),
        (call(X.clone().requires_grad_(), 1, flag=True), "requires_grad"),
        (call(X.to("meta"), 1, flag=True), "cpu.*meta"),
        (call(X, 2, flag=True), "arguments other than tensors"),
        (call(X, 1.0, flag=True), "arguments other than tensors"),
        (call(X, 1, flag=False), "arguments other than tensors"),
        (call(X, 1), "structure"),
        (call(X, flag=True), "structure"),
        (call([X], 1, flag=True), "structure"),
        (call(X, X, flag=True), "structure"),
    ],
)
def test_another_call_differs(other, message):
    import re

    difference = call(X, 1, flag=True).difference(other)
    assert difference is not None
    assert re.search(message, difference)


def test_the_same_call_with_other_data_does_not_differ():
    assert call(X, 1, flag=True).difference(call(torch.zeros(3, 4), 1, flag=True)) is None
    assert call(X, a=1, b=2).difference(call(X, a=1, b=2)) is None


def test_one_tensor_given_twice_is_another_call_than_two():
    two = call(X, X.clone())
    assert "same tensor" in two.difference(call(X, X))
    assert call(X, X).difference(call(X + 1, X)) is not None


def test_autocast_is_part_of_a_call():
    plain = call(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = call(X)
        assert under.difference(call(X)) is None
    with torch.autocast("cpu", dtype=torch.float16):
        assert "autocast" in under.difference(call(X))
    assert "autocast" in plain.difference(under)


def test_the_default_dtype_is_part_of_a_call():
    plain = call(X)
    torch.set_default_dtype(torch.float64)
    try:
        assert "default dtype" in plain.difference(call(X))
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_argument_that_does_not_compare_is_compared_by_what_it_holds():
    class Stubborn:
        __hash__ = None

        def __init__(self, value):
            self.value = value

        def __eq__(self, other):
            raise RuntimeError

    assert call(X, Stubborn(1)).difference(call(X, Stubborn(1))) is None
    assert call(X, Stubborn(1)).difference(call(X, Stubborn(2))) is not None


CHANGES = {
    "training of a submodule": (lambda m: m.body[0].eval(), r"body\.0\.training was True"),
    "training": (lambda m: setattr(m, "training", False), "Net.training was True and is False"),
    "dropout.p": (lambda m: setattr(m.body[0], "p", 0.5), r"body\.0\.p was 0\.1 and is 0\.5"),
    "batch norm momentum": (lambda m: setattr(m.body[2], "momentum", None), "momentum"),
    "number on the root": (lambda m: setattr(m, "scale", 3.0), r"Net\.scale was 1\.0 and is 3\.0"),
    "config": (lambda m: setattr(m.config, "scale", 3.0), "config was changed"),
    "list": (lambda m: m.sizes.append(3), "sizes was changed"),
    "frozen": (lambda m: m.body[1].weight.requires_grad_(False), r"body\.1 .*requires_grad"),
    "frozen tied": (lambda m: m.enter.requires_grad_(False), "requires_grad"),
    "replaced submodule": (lambda m: m.body.__setitem__(1, nn.Linear(4, 4)), "body were replaced"),
    "added submodule": (lambda m: m.add_module("extra", nn.ReLU()), "replaced"),
    "removed submodule": (lambda m: m.body.__delitem__(0), "replaced"),
    "submodule set to none": (lambda m: setattr(m, "body", None), "replaced"),
    "forward hook": (lambda m: m.enter.register_forward_hook(print), "enter has other hooks"),
    "pre-hook": (lambda m: m.enter.register_forward_pre_hook(print), "enter has other hooks"),
    "backward hook": (lambda m: m.enter.register_full_backward_hook(print), "other hooks"),
    "untied": (lambda m: setattr(m.tied, "weight", nn.Parameter(torch.ones(4, 4))), "share"),
    "tied": (lambda m: setattr(m.body[1], "weight", m.enter.weight), "share"),
    "dtype": (lambda m: m.body[1].double(), "another shape, type"),
    "device": (lambda m: m.to("meta"), "another shape, type"),
    "shape of a parameter": (
        lambda m: setattr(m.body[1], "weight", nn.Parameter(torch.ones(5, 4))),
        "another shape",
    ),
    "stride of a parameter": (
        lambda m: setattr(m.body[1], "weight", nn.Parameter(torch.ones(4, 4).t())),
        None,
    ),
    "bias removed": (lambda m: setattr(m.body[1], "bias", None), "another shape|share"),
    "buffer of another type": (lambda m: setattr(m, "mean", torch.zeros(4, dtype=torch.long)), ""),
    "tensor attribute": (lambda m: setattr(m, "mask", torch.ones(4, 1)), "another shape"),
    "tensor attribute removed": (lambda m: setattr(m, "mask", None), ""),
    "new attribute": (lambda m: setattr(m, "flag", True), ""),
}


@pytest.mark.parametrize(
    ("change", "message"), [c for n, c in CHANGES.items() if c[1] is not None],
    ids=[n for n, c in CHANGES.items() if c[1] is not None],
)  # fmt: skip
def test_a_changed_module_is_noticed_and_named(change, message):
    import re

    module = Net()
    check = ModuleState(module).bind(module)
    assert check() is None
    change(module)
    difference = check()
    assert difference is not None
    assert re.search(message, difference)


def test_a_hook_exchanged_for_another_is_noticed():
    module = Net()
    handle = module.enter.register_forward_hook(lambda *_: None)
    check = ModuleState(module).bind(module)
    handle.remove()
    module.enter.register_forward_hook(lambda m, a, output: 2 * output)
    assert "hooks" in check()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.enter.weight.data.mul_(2),
        lambda m: m.mean.add_(1),
        lambda m: m.load_state_dict(Net().state_dict()),
        lambda m: m(X).sum().backward(),
        lambda m: m.zero_grad(),
        lambda m: m.eval().train(),
        lambda m: setattr(m, "mask", torch.zeros(4)),
        lambda m: setattr(m, "mean", torch.ones(4)),
    ],
    ids=["weights", "buffer", "load", "step", "zero_grad", "eval and back", "mask", "new buffer"],
)
def test_what_changes_in_training_is_no_difference(change):
    module = Net()
    check = ModuleState(module).bind(module)
    change(module)
    assert check() is None


def test_a_copy_of_the_module_is_the_same_module():
    module = Net()
    other = copy.deepcopy(module)
    assert ModuleState(module).bind(other)() is None
    other.body[0].eval()
    assert ModuleState(module).bind(other)() is not None


def test_another_module_differs():
    assert ModuleState(Net()).bind(nn.Linear(4, 4))() is not None
