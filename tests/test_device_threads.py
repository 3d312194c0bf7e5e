"""A backward on a device runs in threads of torch: what the caller holds and is within holds there.

There are none on the CPU, so they are imitated there.
"""

import contextlib
import threading

import pytest
import torch
from integration_cases.device_threads import backwards_as_on_a_device, in_thread_of_torch
from integration_cases.devices import everywhere
from torch import nn

import remat
from remat_graph.torch import own_thread, process_lock


class _Impatient:
    """A lock for which nobody waits."""

    def __init__(self):
        self._lock = threading.RLock()

    def acquire(self):
        assert self._lock.acquire(blocking=False)

    def release(self):
        self._lock.release()


@pytest.fixture
def _nobody_waits(monkeypatch):
    monkeypatch.setattr(process_lock, "_lock", _Impatient())


def lock_taken():
    with process_lock:
        return own_thread()


@pytest.mark.usefixtures("_nobody_waits")
def test_who_holds_the_lock_of_the_process_holds_it_in_a_backward():
    with process_lock:
        with process_lock:
            pass
        assert in_thread_of_torch(lock_taken) is threading.current_thread()
    assert in_thread_of_torch(lock_taken) is not threading.current_thread()
    assert in_thread_of_torch(own_thread) is not threading.current_thread()
    assert lock_taken() is threading.current_thread()


@everywhere
@pytest.mark.usefixtures("_nobody_waits")
def test_a_hook_may_take_the_lock_in_a_backward_of_who_holds_it(device):
    x, taken = torch.ones(3, device=device, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda _: taken.append(lock_taken()))
    with backwards_as_on_a_device() if device == "cpu" else contextlib.nullcontext(), process_lock:
        y.sum().backward()
    assert taken == [threading.current_thread()]


def layers(dropout):
    parts = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(dropout)) for _ in range(4))
    return nn.Sequential(*parts)


@pytest.mark.usefixtures("_nobody_waits")
def test_the_loss_of_a_plan_may_be_of_a_planned_model_that_draws():
    """Its backward draws again, while the plan of the other model is measured."""
    torch.manual_seed(0)
    x = torch.randn(128, 32)
    with backwards_as_on_a_device():
        seen = x.clone().requires_grad_()
        judge = remat.rematerialize(layers(0.1), (seen,), budget=0.6, limit_seconds=0.1)
        assert judge.plan.recomputations

        def loss(output):
            return judge(output).square().mean()

        model = remat.rematerialize(layers(0.0), (x,), budget=0.8, loss=loss, limit_seconds=0.1)
        loss(model(x)).backward()
    assert all(p.grad is not None for p in model.parameters())


class ComputedAgain(torch.autograd.Function):
    """Runs a function without gradients, and once more in the backward."""

    @staticmethod
    def forward(ctx, x, run):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x)
        torch.autograd.backward(output, gradient)
        return x.grad, None


def test_what_is_compiled_and_called_in_a_backward_is_planned():
    """It was said to run without a plan."""
    torch._dynamo.reset()  # what other tests compiled counts towards its limit
    torch.manual_seed(0)
    plain, x = layers(0.0), torch.randn(128, 32)
    options = {"budget": "1MiB", "limit_seconds": 0.1}
    compiled = torch.compile(plain, backend="remat", options=options)

    def gradients(run):
        seen = x.clone().requires_grad_()
        ComputedAgain.apply(seen, run).square().mean().backward()
        found = [seen.grad, *(p.grad for p in plain.parameters())]
        plain.zero_grad()
        return found

    expected = gradients(plain)
    with backwards_as_on_a_device():
        for _ in range(2):
            compiled(x).sum().backward()
            plain.zero_grad()
        for _ in range(3):
            assert all(map(torch.equal, gradients(compiled), expected))
