"""Outputs that a plan does not make: right when they are read, whenever that is, or refused."""

import gc
import random
import weakref
from operator import itemgetter

import pytest
import torch
from exec_cases.schedules import random_schedule
from torch import nn
from torch.nn import functional

from remat_exec import BackwardError, BudgetExceeded, Executable, OutputGone, measure_peak
from remat_graph import Numerics, simulate
from remat_graph.torch import capture
from remat_solvers import store_all

WORDS, WIDTH, ROWS = 600, 8, 40


class Model(nn.Module):
    """A head with dropout and batch norm before it, that returns its loss and its scores."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, x, y):
        x = functional.dropout(self.norm(self.first(x)).relu(), 0.5)
        scores = self.out(x)
        return {"loss": functional.cross_entropy(scores, y), "scores": scores.view(ROWS, 2, -1)}


@pytest.fixture(params=[False, True], ids=["whole", "in slices"])
def step(request):
    torch.manual_seed(0)
    model = Model()
    args = torch.randn(ROWS, WIDTH), torch.randint(WORDS, (ROWS,))
    captured = capture(model, args, costs="estimate")
    captured = captured.with_deferred_outputs(captured.deferrable)
    assert captured.program.deferred == {1}
    if request.param:
        captured = captured.with_alternatives(Numerics.ROUNDING, laid_out=())
        captured = captured.in_slices([(0, 4)])
        assert any("_in_4_slices" in op for op in captured.program.calls)
    return model, args, Executable(captured, store_all(captured.graph))


def eager(model, args, loss=itemgetter("loss")):
    """Give what eager computes from here on, and leave everything as it is."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    returned = model(*args)
    loss(returned).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    model.load_state_dict(state)
    (output,) = (one.detach() for key, one in returned.items() if key != "loss")
    return output, gradients


def run(model, args, executable, **options):
    torch.manual_seed(3)
    return executable(model, list(args), **options)


def check(model, gradients):
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)


def test_a_step_without_it_takes_less_and_has_the_same_gradients(step):
    model, args, executable = step
    _, gradients = eager(model, args)
    with measure_peak() as peak:
        loss, scores = run(model, args, executable)
        loss.backward()
    assert scores.shape == (ROWS, 2, WORDS // 2)
    check(model, gradients)
    assert (
        peak.peak_bytes <= simulate(executable.capture.graph, executable.schedule).peak_bytes + 99
    )


@pytest.mark.parametrize("when", ["before", "after", "in autocast", "in inference mode"])
def test_it_is_what_eager_gives_whenever_it_is_read(step, when):
    model, args, executable = step
    expected, gradients = eager(model, args)
    loss, scores = run(model, args, executable)
    if when == "before":
        assert torch.equal(scores, expected)
    loss.backward()
    state = torch.get_rng_state()
    if when == "in autocast":
        with torch.autocast("cpu"):
            assert torch.equal(scores, expected)
    if when == "in inference mode":
        with torch.inference_mode():
            assert torch.equal(scores.detach(), expected)
    assert torch.equal(scores, expected)
    assert torch.equal(torch.get_rng_state(), state)
    check(model, gradients)
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert torch.equal(scores, expected)  # made once


CHANGES = {
    "an optimizer": lambda model, args: torch.optim.SGD(model.parameters(), 0.1).step(),
    "by hand": lambda model, args: model.out.weight.data.add_(1),
    "by numpy": lambda model, args: model.out.bias.detach().numpy().fill(0),
    "an input": lambda model, args: args[0].zero_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_refused_once_what_it_is_made_of_has_changed(step, name):
    model, args, executable = step
    loss, scores = run(model, args, executable)
    loss.backward()
    CHANGES[name](model, args)
    for _ in range(2):
        with pytest.raises(OutputGone, match="outputs="):
            scores.argmax()
    assert scores.shape == (ROWS, 2, WORDS // 2)


def test_what_it_does_not_read_may_change(step):
    model, args, executable = step
    expected, _ = eager(model, args)
    _, scores = run(model, args, executable)
    args[1].zero_()  # the labels
    assert torch.equal(scores, expected)


def test_a_gradient_of_it_is_right_and_within_what_is_told(step):
    model, args, executable = step
    _, gradients = eager(model, args, lambda one: one["loss"] + one["scores"].exp().sum())
    told = []
    small = Executable(executable.capture, executable.schedule, 0)
    with measure_peak() as peak:
        loss, scores = run(model, args, small, exceeded=lambda error: told.append(error.peak_bytes))
        (loss + scores.exp().sum()).backward()
    check(model, gradients)
    assert peak.peak_bytes <= max(told) + 99


class Middle(nn.Module):
    """Returns its loss, and what it is made of and read by its own backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        first, second, third = self.layers
        middle = first(x).exp()
        return {"loss": third(second(middle).sin()).square().mean(), "middle": middle}


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(6, 12))]
)
def test_a_gradient_of_one_that_the_plan_runs_again_is_right_or_refused(seed):
    torch.manual_seed(0)
    model, args = Middle(), (torch.randn(ROWS, WIDTH),)
    captured = capture(model, args, costs="estimate").with_deferred_outputs(frozenset({1}))
    expected, gradients = eager(model, args, lambda one: one["loss"] + one["middle"].sum())
    schedule = random_schedule(captured.graph, random.Random(seed))
    loss, middle = run(model, args, Executable(captured, schedule))
    refused = ""
    try:
        (loss + middle.sum()).backward()
    except BackwardError as error:
        refused = str(error)
    if refused:
        assert "outputs=" in refused
        assert all(parameter.grad is None for parameter in model.parameters())
    else:
        assert torch.equal(middle, expected)
        check(model, gradients)


def test_reading_tells_of_a_budget_that_it_exceeds(step):
    model, args, executable = step
    small = Executable(executable.capture, executable.schedule, executable.peak_bytes)
    exceeded, read = [], []
    loss, scores = run(model, args, small, exceeded=exceeded.append, read=read.append)
    held = scores.sum().item()
    assert read == [1]
    count = len(exceeded)
    loss.backward()  # while the scores are held
    assert len(exceeded) == count + 1
    assert isinstance(exceeded[-1], BudgetExceeded)
    assert exceeded[-1].peak_bytes == executable.peak_bytes + scores.nbytes
    smaller = Executable(executable.capture, executable.schedule, scores.nbytes)
    _, scores = run(model, args, smaller)
    with pytest.raises(BudgetExceeded, match="outputs="):
        scores.sum()
    assert held


def test_what_it_is_made_of_is_held_no_longer_than_it(step):
    model, args, executable = step
    x = args[0].clone()
    loss, scores = run(model, (x, args[1]), executable)
    gone = weakref.ref(x)
    loss.backward()
    del x
    gc.disable()
    try:
        scores.sum()
        assert gone() is None or scores.grad_fn is None
        loss, scores = run(model, (x := args[0].clone(), args[1]), executable)
        gone = weakref.ref(x)
        loss.backward()
        del x, scores
        assert gone() is None
    finally:
        gc.enable()


def test_an_output_that_is_watched_tells_of_reads(step):
    model, args, executable = step
    whole = executable.capture.with_deferred_outputs(frozenset())
    executable = Executable(whole, store_all(whole.graph))
    expected, gradients = eager(model, args)
    reads, started = [], []
    loss, scores = run(
        model, args, executable,
        started=lambda *seen: started.append(seen), read=reads.append, watched=frozenset({1}),
    )  # fmt: skip
    detached = scores.detach()
    loss.backward()
    assert reads == []
    assert started == [(frozenset({1}), frozenset())]
    assert torch.equal(detached, expected)
    assert reads == [1]
    check(model, gradients)
    loss, scores = run(
        model, args, executable,
        started=lambda *seen: started.append(seen), read=reads.append, watched=frozenset({1}),
    )  # fmt: skip
    del scores
    loss.backward()
    assert started[-1][1] == {1}
