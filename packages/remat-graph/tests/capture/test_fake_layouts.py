"""What is traced lies as it does when it runs, of operators whose fake results lie otherwise."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from remat_graph.torch.tracing.layouts import lying_as_real

aten = torch.ops.aten

ROWS, CHANNELS, LENGTH = 4, 6, 5
PLAIN = torch.linspace(0.1, 0.9, ROWS * CHANNELS * LENGTH).view(ROWS, CHANNELS, LENGTH)
TURNED = PLAIN.permute(2, 1, 0).contiguous().permute(2, 1, 0)
PART = torch.empty(ROWS, CHANNELS, 2 * LENGTH)[..., ::2].copy_(PLAIN)
WEIGHT, MASK = torch.ones(CHANNELS), PLAIN > 0.5

# Each of two tensors, one of which lies as no contiguous one does.
CALLS = {
    "batch norm": lambda x, y: aten._native_batch_norm_legit.no_stats(
        x, WEIGHT, WEIGHT, True, 0.1, 1e-5
    ),
    "its backward": lambda x, y: aten.native_batch_norm_backward(
        x, y, WEIGHT, None, None, WEIGHT, WEIGHT, True, 1e-5, [True, True, True]
    ),
    "copysign": lambda x, y: aten.copysign.Tensor(x, y),
    "dropout": lambda x, y: aten.native_dropout_backward(x, MASK, 2.0),
    "elu": lambda x, y: aten.elu_backward(x, 1, 1, 1, False, y),
    "gelu": lambda x, y: aten.gelu_backward(x, y),
    "hardswish": lambda x, y: aten.hardswish_backward(x, y),
    "hardtanh": lambda x, y: aten.hardtanh_backward(x, y, 0, 6),
    "huber loss": lambda x, y: aten.huber_loss_backward(PLAIN, x, y, 0, 1.0),
    "log sigmoid": lambda x, y: aten.log_sigmoid_forward(x),
    "log softmax": lambda x, y: aten._log_softmax_backward_data(x, y, 1, torch.float32),
    "logit": lambda x, y: aten.logit_backward(x, y, 0.1),
    "mse loss": lambda x, y: aten.mse_loss_backward(PLAIN, x, y, 0),
    "power": lambda x, y: aten.pow.Scalar(2, x),
    "smooth l1 loss": lambda x, y: aten.smooth_l1_loss_backward(PLAIN, x, y, 0, 1.0),
    "softplus": lambda x, y: aten.softplus_backward(x, y, 1, 20),
}


def lies(result):
    leaves = [item for item in pytree.tree_leaves(result) if isinstance(item, torch.Tensor)]
    return [(tuple(item.shape), item.stride()) for item in leaves]


def of_fakes(call, one, two):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = mode.from_tensor(one), mode.from_tensor(two)
    with mode:
        return lies(call(*fakes))


def wrong_without(call):
    pairs = [(one, two) for one in (PLAIN, TURNED, PART) for two in (PLAIN, TURNED, PART)]
    return [pair for pair in pairs if of_fakes(call, *pair) != lies(call(*pair))]


@pytest.mark.parametrize("name", CALLS)
def test_a_fake_result_lies_as_a_real_one(name):
    with lying_as_real():
        assert not wrong_without(CALLS[name])


def test_another_thread_and_what_comes_after_see_what_torch_says():
    before = FakeTensorMode.dispatch
    wrong = []
    with lying_as_real():
        other = threading.Thread(target=lambda: wrong.extend(wrong_without(CALLS["hardtanh"])))
        other.start()
        other.join()
    assert wrong
    assert FakeTensorMode.dispatch is before
