"""A compiled group gives what its calls give, or says why it is not compiled."""

import pytest
import torch
from graph_cases.groups import Gelu, groups_of, in_groups, program_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from remat_graph.torch import run_fused
from remat_graph.torch.fusing.compiling import _traced, compile_kernels
from remat_graph.torch.fusing.kernel import kernel_of
from remat_graph.torch.fusing.program import kernels_of


def test_compiled_kernels_give_what_their_calls_give():
    program = program_of(Gelu().double(), torch.randn(8, 16, dtype=torch.double))
    kernels = list(kernels_of(in_groups(program)).values())
    compile_kernels(kernels)
    torch.manual_seed(0)
    for kernel in kernels:
        assert kernel.compiled is not None, kernel.failure
        inputs = [
            torch.rand(kernel.facts[name].shape, dtype=kernel.facts[name].dtype)
            for name in kernel.body.inputs
        ]
        for one, two in zip(kernel.interpreted(inputs), kernel.run(inputs), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
        assert kernel.compiled is not None, kernel.failure


ACTIVATIONS = [
    functional.elu, functional.selu, functional.mish, functional.hardtanh, functional.softsign,
    functional.tanhshrink, functional.softshrink, functional.hardshrink, functional.logsigmoid,
    functional.leaky_relu, functional.relu6, functional.glu, functional.hardsigmoid,
    functional.gelu, functional.silu, functional.softplus, functional.hardswish,
    lambda x: functional.gelu(x, approximate="tanh"), lambda x: functional.softmax(x, -1),
    lambda x: functional.log_softmax(x, -1), lambda x: functional.layer_norm(x, x.shape[-1:]),
]  # fmt: skip


class Activations(nn.Module):
    """The sum of many activations of a product."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return sum(activation(self.layer(x) * 3).sin().sum() for activation in ACTIVATIONS)


def test_operators_are_taken_apart_in_their_own_precision():
    program = program_of(Activations().double(), torch.randn(40, 6, dtype=torch.double))
    torch.manual_seed(0)
    kernels = kernels_of(in_groups(program)).values()
    assert sum(len(kernel.body.calls) for kernel in kernels) > 2 * len(ACTIVATIONS)
    for kernel in kernels:
        inputs = [2 * torch.randn(kernel.facts[n].shape).double() for n in kernel.body.inputs]
        inputs = [
            each.to(kernel.facts[n].dtype)
            for each, n in zip(inputs, kernel.body.inputs, strict=True)
        ]
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(each) for each in inputs]
            traced = _traced(kernel, kernel.facts, fakes, 0)
        for one, two in zip(kernel.interpreted(inputs), traced(*inputs), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half])
def test_rounding_to_16_bits_is_computed(dtype):
    class Rounded(nn.Module):
        def forward(self, x):
            lost = x - x.to(dtype).float()
            return lost.exp() * x

    program = program_of(Rounded(), torch.randn(64, 33, requires_grad=True))
    (kernel, *_) = kernels_of(in_groups(program)).values()
    compile_kernels([kernel])
    inputs = [torch.randn(kernel.facts[name].shape) for name in kernel.body.inputs]
    for one, two in zip(kernel.interpreted(inputs), run_fused(kernel, *inputs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
    assert kernel.compiled is not None


def test_calls_run_one_by_one_where_inputs_lie_otherwise():
    program = program_of(Gelu(), torch.randn(8, 16))
    kernel = max(kernels_of(in_groups(program)).values(), key=lambda each: len(each.body.calls))
    compile_kernels([kernel])
    inputs = [torch.rand(kernel.facts[name].shape) for name in kernel.body.inputs]
    expected = kernel.interpreted(inputs)
    for one, two in zip(expected, run_fused(kernel, *inputs), strict=True):
        torch.testing.assert_close(one, two)
    transposed = [each.mT.contiguous().mT if each.ndim > 1 else each for each in inputs]
    assert any(
        each.stride() != other.stride() for each, other in zip(transposed, inputs, strict=True)
    )
    assert kernel.compiled is not None
    for one, two in zip(expected, run_fused(kernel, *transposed), strict=True):
        torch.testing.assert_close(one, two)
    assert kernel.compiled is None
    assert "stride" in kernel.failure


def test_code_that_gives_other_tensors_than_planned_is_not_run_again():
    program = program_of(Gelu(), torch.randn(8, 16))
    group = groups_of(program)[0]
    kernel = kernel_of(group.body, {**program.facts})
    kernel.compiled = lambda inputs: [inputs[0] for _ in kernel.body.outputs]
    kernel.failure = None
    inputs = [torch.rand(kernel.facts[name].shape) for name in kernel.body.inputs]
    expected = kernel.interpreted(inputs)
    for one, two in zip(expected, run_fused(kernel, *inputs), strict=True):
        assert torch.equal(one, two)
    assert kernel.compiled is None
    assert "not" in kernel.failure


def test_what_cannot_be_compiled_says_why(monkeypatch):
    program = program_of(Gelu(8), torch.randn(4, 8))
    kernel = next(iter(kernels_of(in_groups(program)).values()))
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx_inner",
        lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no such thing")),
    )
    compile_kernels([kernel])
    assert kernel.failure == "RuntimeError: no such thing"
    inputs = [torch.rand(kernel.facts[name].shape) for name in kernel.body.inputs]
    assert len(kernel.run(inputs)) == len(kernel.body.outputs)
