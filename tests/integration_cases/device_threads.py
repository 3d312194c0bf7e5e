"""Backwards on the CPU that run as on a device: in a thread of torch, with its state of the caller.

That state is what `at::ThreadLocalState` holds. TorchScript's `fork` hands it on as the engine of
autograd does, and is the one way from Python to do so.
"""

import functools
import warnings
from contextlib import contextmanager

import pytest
import torch

_works = {}  # what is to be done in threads of torch, by number


@torch.jit.ignore
def _do(number: int) -> int:
    _works.pop(number)()
    return 0


def _fork(number: int) -> int:
    return torch.jit.wait(torch.jit.fork(_do, number))


@functools.cache
def _forking():
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        return torch.jit.script(_fork)


def in_thread_of_torch(work):
    """Give what something gives, which a thread of torch does with the state of this thread."""
    done, raised = [], []

    def run():
        try:
            done.append(work())
        except BaseException as error:
            raised.append(error)

    _works[id(run)] = run
    _forking()(id(run))
    if raised:
        raise raised.pop()
    return done.pop()


class _Engine:
    """The engine of autograd, whose outermost backwards run in a thread of torch."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def run_backward(self, *args, **kwargs):
        run = functools.partial(self._engine.run_backward, *args, **kwargs)
        within = torch._C._current_graph_task_id() != -1
        if within or not torch._C._is_multithreading_enabled():
            return run()
        return in_thread_of_torch(run)


@contextmanager
def backwards_as_on_a_device():
    """Run backwards in a thread of torch."""

    class Variable:
        _execution_engine = _Engine(torch.autograd.graph.Variable._execution_engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.autograd.graph.Variable", Variable)
        yield
