"""cuDNN's batch norm where eager takes it: on the CPU, with a stand-in for its two operators.

`tests/test_gpu.py` runs the operators themselves.
"""

from types import SimpleNamespace

import pytest
import torch
from exec_cases.models import NORMED
from exec_cases.schedules import replay_of
from exec_cases.training import assert_bitwise_equal, train

from remat_graph.torch.cost.costs import measure_costs
from remat_graph.torch.kernels import batch_norm

aten = torch.ops.aten


class CuDNN:
    """The same arithmetic as torch's own, by the arguments and results of cuDNN's operators."""

    def __init__(self):
        self.forwards = self.backwards = 0

    def forward(self, x, weight, bias, mean, var, training, momentum, eps):
        assert training
        assert mean.dtype == var.dtype == weight.dtype
        self.forwards += 1
        made = torch.native_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
        return (*made, x.new_empty(0, dtype=torch.uint8))

    def backward(self, x, grad, weight, mean, var, saved_mean, saved_deviation, eps, reserve):
        assert grad.stride() == x.stride()
        assert reserve.numel() == 0
        self.backwards += 1
        return aten.native_batch_norm_backward(
            grad, x, weight, None, None, saved_mean, saved_deviation, True, eps, [True] * 3
        )


@pytest.fixture
def cudnn(monkeypatch):
    stand_in = CuDNN()
    operators = SimpleNamespace(
        cudnn_batch_norm=SimpleNamespace(default=stand_in.forward),
        cudnn_batch_norm_backward=SimpleNamespace(default=stand_in.backward),
    )
    monkeypatch.setattr(batch_norm, "aten", operators)
    monkeypatch.setattr(batch_norm, "_is_cudnns", lambda *_: True)
    return stand_in


def trained(model):
    return train(model, lambda module, _: module(*NORMED.args()), NORMED.loss)


def test_training_by_cudnns_computes_what_eager_does_and_writes_statistics_once(cudnn):
    again = replay_of(NORMED, "batch_norm")
    stored, replayed = NORMED.remat(), NORMED.remat(again)
    expected = trained(NORMED.model())
    cudnn.forwards = cudnn.backwards = 0  # some were measured
    assert_bitwise_equal(trained(stored), expected)
    each = cudnn.forwards
    assert each == cudnn.backwards > 0
    assert_bitwise_equal(trained(replayed), expected)
    assert cudnn.forwards == 3 * each


def test_what_is_measured_is_what_is_run(cudnn):
    measure_costs(NORMED.captured.program)
    assert cudnn.forwards
    assert cudnn.backwards


def test_gradients_that_are_not_wanted_are_none(cudnn):
    x, weight = torch.randn(2, 3, 4, 4), torch.ones(3)
    _, mean, deviation = batch_norm.batch_norm_again(x, weight, weight, True, 0.1, 1e-5)
    wanted = [True, False, True]
    made = batch_norm.batch_norm_backward(
        x.transpose(2, 3), x, weight, None, None, mean, deviation, True, 1e-5, wanted
    )
    assert [gradient is not None for gradient in made] == wanted


def test_evaluation_and_the_cpu_have_torchs_own(monkeypatch):
    monkeypatch.delattr(torch._C, "_select_batch_norm_backend")  # nobody asks on the CPU
    x, weight, mean, var = torch.randn(2, 3, 4), torch.ones(3), torch.zeros(3), torch.ones(3)
    for training in (True, False):
        given = (x, weight, weight, mean, var, training, 0.1, 1e-5)
        found = batch_norm.batch_norm(*given)
        expected = aten._native_batch_norm_legit_functional(*given)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
