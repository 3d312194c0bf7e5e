"""Who asks for the gradient of an output that the model reads itself is refused, others are not."""

import functools
import gc
import io
import warnings
import weakref

import pytest
import torch
from exec_cases.models import Case
from torch import nn

from remat_exec import BackwardError


class Reading(nn.Module):
    """Returns a hidden layer, and what `read` makes of it."""

    def __init__(self, read):
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 8)
        self.read = read

    def forward(self, x):
        hidden = torch.tanh(self.hidden(x))
        return hidden, self.read(self, hidden)


READS = {
    "whole": lambda m, h: m.head(h),
    "a part": lambda m, h: h[:, :2].exp(),
    "a part of a view": lambda m, h: h.view(2, 16)[0].exp(),
    "through others": lambda m, h: m.head(h).softmax(1).log(),
    "twice": lambda m, h: h * h.cos(),
}
NOT_READ = {
    "detached": lambda m, h: m.head(h.detach()),
    "its largest alone": lambda m, h: m.head.weight[h.argmax(1)],
    "a view that is returned": lambda m, h: h[:, 1],
}


@functools.cache
def case_of(read):
    """Make a case, which is captured once for all uses."""
    return Case("reading", lambda: Reading(read), lambda: (torch.randn(4, 6),), torch.sum)


def outputs(read, *, planned=True):
    case = case_of(read)
    model = case.remat() if planned else case.model()
    return (*model(*case.args()), model.module if planned else model)


def total(hidden, out):
    return hidden.square().sum() + out.sum()


def by_hook(hidden, out, module):
    hidden.register_hook(lambda grad: 3 * grad)
    loss = total(hidden, out)
    del hidden  # the hook stays
    loss.backward()


def by_retaining(hidden, out, module):
    hidden.retain_grad()
    total(hidden, out).backward()


def by_asking(hidden, out, module):
    torch.autograd.grad(total(hidden, out), hidden)


ASKS = [by_hook, by_retaining, by_asking]


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_part_of_a_gradient_is_refused(read, ask):
    with pytest.raises(BackwardError, match="output 0 of the model, which the model reads itself"):
        ask(*outputs(read))


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("read", NOT_READ.values(), ids=NOT_READ)
def test_whole_gradients_are_eagers(read, ask):
    found = []
    for planned in (True, False):
        hidden, out, module = outputs(read, planned=planned)
        module.zero_grad()
        ask(hidden, out, module)
        found.append([hidden.grad if hidden.retains_grad else None])
        found[-1] += [parameter.grad for parameter in module.parameters()]
    for got, expected in zip(*found, strict=True):
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)


def test_hooks_on_others_and_hooks_taken_off_are_left_alone():
    hidden, out, _ = outputs(READS["whole"])
    handle = hidden.register_hook(lambda grad: 3 * grad)
    seen = []
    out.register_hook(seen.append)
    handle.remove()
    total(hidden, out).backward()
    assert len(seen) == 1


def test_outputs_are_written_to_files_without_a_warning():
    hidden, *_ = outputs(READS["whole"])
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(hidden, file)
    file.seek(0)
    assert torch.equal(torch.load(file), hidden)


def test_what_is_watched_is_let_go_of_without_the_collector():
    hidden, out, _ = outputs(READS["whole"])
    held = nn.Linear(2, 2)
    there = weakref.ref(held)
    handle = hidden.register_hook(lambda grad, held=held: None)
    gc.disable()
    try:
        del hidden, out, handle, held
        assert there() is None
    finally:
        gc.enable()


def test_a_gradient_that_comes_alone_is_whole():
    found = []
    for planned in (True, False):
        hidden, _, module = outputs(READS["whole"], planned=planned)
        module.zero_grad()
        hidden.retain_grad()
        hidden.square().sum().backward()
        found.append((hidden.grad, module.hidden.weight.grad))
    assert all(map(torch.equal, *found))


def test_another_output_may_be_asked_for():
    _, out, _ = outputs(READS["whole"])
    (gradient,) = torch.autograd.grad(out.square().sum(), out)
    assert torch.equal(gradient, 2 * out)
