"""How `benchmarks/matrix.py` tells rounding, which grows from step to step, from faults."""

import pytest
import torch
from integration_cases.kernels import compiled_here
from torch import nn

import matrix_cases
from matrix_cases import Built, Case
from matrix_cases.conditioning import _shaken, beyond_rounding, in_double
from matrix_cases.training import STEPS, train
from remat_graph.torch.fusing.kernel import Kernel


class Norms(nn.Module):
    """Batch norms over two samples that are nearly equal make much of what rounding leaves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU6()) for _ in range(6)
        )

    def forward(self, x):
        x = 1 + 1e-4 * x
        for layer in self.layers:
            x = 1 + 1e-2 * layer(x)
        return x


def built():
    torch.manual_seed(0)
    return Built(Norms(), (torch.randn(3, 8),))


def calls():
    return in_double([built()] * STEPS)


def test_rounding_alone_is_told_from_a_fault():
    plain = train(calls(), peak=False)
    other = train(_shaken(calls(), 1000), peak=False)
    steps, beyond = beyond_rounding(calls, other, plain)
    assert len(steps.split(", ")) == STEPS
    assert not beyond


@pytest.mark.parametrize("share", [1e-4, 1e-7])
@pytest.mark.parametrize("step", range(STEPS))
def test_a_share_of_one_gradient_is_a_fault(step, share):
    plain = train(calls(), peak=False)
    faulty, seen = calls(), []

    def hook(gradient):
        seen.append(None)
        return gradient * (1 + share * (len(seen) == step + 1))

    faulty[0].model.layers[2][0].weight.register_hook(hook)
    _, beyond = beyond_rounding(calls, train(faulty, peak=False), plain)
    assert f"step {step + 1}, layers.2.0.weight" in beyond


@pytest.mark.sweep
@pytest.mark.parametrize("dropped", [False, True])
def test_a_term_that_a_group_drops_is_wrong(dropped, monkeypatch):
    run = Kernel.run

    def faulty(kernel, inputs):
        outputs = run(kernel, inputs)
        if dropped and torch._C._current_graph_task_id() != -1:
            return [output - output.mean() for output in outputs]
        return outputs

    monkeypatch.setattr(Kernel, "run", faulty)
    with compiled_here():
        outcome = matrix_cases.judge(Case("modules/Norms", lambda: [("", built)]), groups=True)
    assert outcome.groups
    assert (outcome.category == "WRONG") is dropped, outcome
