"""A backward that is asked for the gradients of some tensors alone computes no others."""

import itertools
import random

import pytest
import torch
from exec_cases.models import CASES, MLP, RESIDUAL, Case, Scheduled
from exec_cases.schedules import random_schedule
from torch.utils._python_dispatch import TorchDispatchMode

from remat_exec import measure_peak
from remat_graph import simulate

aten = torch.ops.aten


class Products(TorchDispatchMode):
    """Counts products of matrices, and the gradients that convolutions give."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (aten.mm.default, aten.addmm.default):
            self.count += 1
        if func is aten.convolution_backward.default:
            self.count += sum(args[-1])
        return func(*args, **(kwargs or {}))


def with_gradient(case):
    def make_args():
        return tuple(x.requires_grad_() for x in case.make_args())

    return Case(case.name, case.make, make_args, case.loss)


def ask(case, model, module, position):
    """Give one gradient, of an input or a parameter; the products that its backward ran."""
    torch.manual_seed(3)
    args = case.args()
    loss = case.loss(model(*args))
    with Products() as products:
        (found,) = torch.autograd.grad(loss, [[*args, *module.parameters()][position]])
    return found, products.count


KEPT = ("attention", "residual")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if str(case) in KEPT else pytest.mark.sweep)
        for case in (*CASES, RESIDUAL)
    ],
    ids=str,
)
def test_one_gradient_alone_has_the_same_bits_by_any_schedule(case):
    case = with_gradient(case)
    graph = case.captured.graph
    for seed in range(4):
        schedule = random_schedule(graph, random.Random(seed)) if seed else None
        model = case.remat(schedule)
        for position in range(1 + len(list(model.module.parameters()))):
            torch.manual_seed(3)
            args = case.args()
            case.loss(model(*args)).backward()
            expected = [*args, *model.module.parameters()][position].grad
            model.zero_grad()
            assert torch.equal(ask(case, model, model.module, position)[0], expected)


@pytest.mark.parametrize("case", [MLP, RESIDUAL], ids=str)
@pytest.mark.parametrize("position", range(5))
def test_no_more_products_run_than_in_eager(case, position):
    case = with_gradient(case)
    model, eager = case.remat(), case.model()
    for _ in range(2):
        got, products = ask(case, model, model.module, position)
        expected, in_eager = ask(case, eager, eager, position)
        torch.testing.assert_close(got, expected)
        assert products == in_eager


def test_a_backward_for_some_leaves_takes_no_more_than_planned_and_ends():
    ended = []
    case = with_gradient(MLP)
    schedule = random_schedule(case.captured.graph, random.Random(5))
    model = Scheduled(case.model(), case.captured, schedule)
    for module in (model.module[0], model.module[2]):
        with measure_peak() as peak:
            (x,) = case.args()
            outputs = model.executable(model.module, [x], lambda *_: None, lambda: ended.append(1))
            outputs[0].square().mean().backward(inputs=[module.weight])
        assert module.weight.grad is not None
        assert module.bias.grad is None
        assert x.grad is None
        assert peak.peak_bytes <= simulate(case.captured.graph, schedule).peak_bytes + 4096
    assert ended == [1, 1]


def test_few_backwards_in_part_are_kept():
    executable = with_gradient(MLP).remat().executable
    for unwanted in itertools.combinations(executable.capture.differentiable, 2):
        executable.variant(frozenset(), None, frozenset(unwanted))
    for unwanted in itertools.combinations(executable.capture.differentiable, 3):
        executable.variant(frozenset(), None, frozenset(unwanted))
    assert len(executable._variants) == 1 + 16
