"""Training steps, and everything that must be equal between two ways to run them."""

from dataclasses import dataclass

import torch

from remat_exec import Executable
from remat_graph.torch import flatten
from remat_solvers import store_all


@dataclass
class Record:
    """What some training steps left behind, by name of what it is."""

    tensors: dict[str, torch.Tensor | None]


def train(model, call, loss, steps=2, seed=0, optimizer=torch.optim.SGD, **options):
    """Train; `call(model, step)` runs the forward, `loss` makes a scalar of what it returns."""
    options.setdefault("lr", 0.05)
    chosen = optimizer(model.parameters(), **options)
    tensors = {}
    torch.manual_seed(seed)
    for step in range(steps):
        chosen.zero_grad()
        output = call(model, step)
        value = loss(output)
        value.backward()
        for position, leaf in enumerate(flatten(output)[0]):  # a copy before would take memory
            tensors[f"output {position} of step {step}"] = leaf.detach().clone()
        tensors[f"loss of step {step}"] = value.detach().clone()
        for position, parameter in enumerate(model.parameters()):
            grad = parameter.grad
            tensors[f"gradient {position} of step {step}"] = None if grad is None else grad.clone()
        chosen.step()
    for position, buffer in enumerate(model.buffers()):
        tensors[f"buffer {position}"] = buffer.clone()
    for position, parameter in enumerate(model.parameters()):
        tensors[f"parameter {position}"] = parameter.detach().clone()
    tensors["random state"] = torch.get_rng_state()
    return Record(tensors)


def assert_bitwise_equal(got, expected):
    """Compare two records bit by bit; NaNs are equal where they are at the same places."""
    assert got.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        other = got.tensors[name]
        if tensor is None or other is None:
            assert tensor is other, name
            continue
        assert tensor.dtype == other.dtype, name
        assert tensor.shape == other.shape, name
        assert torch.equal(tensor, other), f"{name}: {(tensor - other).abs().max()}"


def assert_close(got, expected, rtol=1e-4):
    """Compare two records up to rounding; random states bit by bit."""
    assert got.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        other = got.tensors[name]
        if tensor is None or other is None:
            assert tensor is other, name
        elif not (tensor.is_floating_point() or tensor.is_complex()):
            assert torch.equal(tensor, other), name
        else:
            size = float(tensor.abs().max()) if tensor.numel() else 0.0
            message = f"{name} differs by {{}}"
            torch.testing.assert_close(
                other, tensor, rtol=rtol, atol=rtol * size + 1e-7, msg=message.format
            )


def _gradients(model, loss):
    loss.backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def assert_same_gradients_by(captured, case, schedule, used):
    """Compare a backward over other outputs than planned for with that of storing everything."""
    found = []
    for steps in (schedule, store_all(captured.graph.without_alternatives())):
        model = case.remat()
        model.executable = Executable(captured, steps)
        torch.manual_seed(3)
        output = model(*case.args())
        terms = [v.square().sum() for key, v in output.items() if used in (key, "both")]
        found.append(_gradients(model, sum(terms)))
    for got, expected in zip(*found, strict=True):
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)
