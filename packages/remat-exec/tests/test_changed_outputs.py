"""Outputs that share memory, which the forward changes in place, have eager's gradients."""

import itertools
import random

import pytest
import torch
from exec_cases.models import Case
from torch import nn

from remat_exec import BackwardError

VIEWS = [
    lambda a: a.t(),
    lambda a: a.reshape(-1),
    lambda a: a[0],
    lambda a: a[1:],
    lambda a: a.unsqueeze(0),
    lambda a: a[..., ::2],
    lambda a: a.chunk(2, -1)[-1],
    lambda a: a.unbind(0)[0],
    lambda a: a.expand(2, *a.shape),
    lambda a: a.detach(),
]


def change(a, other, kind):
    """Change a tensor in place, one way or another."""
    match kind:
        case 0:
            a.mul_(2)
        case 1:
            a.add_(other.sum())
        case 2:
            a[0] = a[-1] * 3
        case 3:
            with torch.no_grad():
                a.neg_()


class Drawn(nn.Module):
    """Takes views and changes memory in place, as drawn, and returns some of what there is."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()
        self.steps = [
            (draw.choice("vvvvvcci+"), draw.random(), draw.randrange(60)) for _ in range(9)
        ]
        self.returned = [draw.random() for _ in range(draw.randrange(2, 5))]

    def forward(self, x):
        made = [torch.tanh(self.first(x)), x]
        made.append(made[0] * 2)
        for kind, which, number in self.steps:
            a = made[int(which * len(made))]
            match kind:
                case "v":
                    views = VIEWS if a.dim() == 2 else VIEWS[1:2] + VIEWS[4:5] + VIEWS[-1:]
                    made.append(views[number % len(views)](a))
                case "c" if a.dim():
                    change(a, self.second.weight, number % 4)
                case "i":
                    made.append(a.clone())
                case "+":
                    made.append(a * 3 + self.second.bias.sum())
        return [made[int(which * len(made))] for which in self.returned]


def asked(model, case, at, ask):
    """Give what one sees who asks for the gradient of the output there, and all after it."""
    found = []
    model.zero_grad()
    outputs = model(*case.args())
    _ = [output.grad_fn for output in outputs]  # torch may crash where it was not read before
    output = outputs[at]
    match ask:
        case 0:
            output.register_hook(lambda grad: found.append(grad + 0))
        case 1:
            output.register_hook(lambda grad: 3 * grad)
        case 2:
            output.retain_grad()
    loss = sum((output * output.detach().cos()).sum() for output in outputs)
    weight = getattr(model, "module", model).first.weight
    if ask == 3:
        found += torch.autograd.grad(loss, [output, weight], allow_unused=True)
    else:
        loss.backward()
    found += [output.grad] if ask == 2 else []
    found += [parameter.grad for parameter in model.parameters()]
    return [None if each is None else each + 0 for each in found]


def make_args():
    return (torch.randn(4, 4).double().requires_grad_() * 1,)


def runs_in_eager(seed):
    model = Drawn(seed)
    try:
        sum(output.sum() for output in model(*make_args())).backward()
    except (IndexError, RuntimeError):  # as where the backward reads what was changed
        return False
    return model.first.weight.grad is not None


def is_none_or_zero(gradient):
    return gradient is None or not gradient.any()


def are_equal(a, b):
    if a is None or b is None:
        return is_none_or_zero(a) and is_none_or_zero(b)
    return torch.allclose(a, b, rtol=1e-12)


SEEDS = [seed for seed in range(230) if runs_in_eager(seed)]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=() if at % 8 == 0 else pytest.mark.sweep)
        for at, seed in enumerate(SEEDS)
    ],
)
def test_gradients_are_eagers_or_refused(seed):
    case = Case("drawn", lambda: Drawn(seed), make_args, sum)
    for at, ask in itertools.product(range(len(Drawn(seed).returned)), range(5)):
        if not case.model()(*case.args())[at].requires_grad:
            continue
        try:
            got = asked(case.remat(), case, at, ask)
        except BackwardError as error:
            refusal = str(error)
        else:
            refusal = None
        if refusal is not None:
            assert "is asked for" in refusal
            assert ask != 4
            continue
        expected = asked(case.model(), case, at, ask)
        assert all(are_equal(a, b) for a, b in zip(got, expected, strict=True))


def view_and_constant(h):
    view = h.view(-1)
    return view, view.detach()


def constant_first(h):
    view = h.t()
    return view.detach(), view, h * 2


def whole_too(h):
    view = h.view(2, 8)
    return h, view, view.detach()


def changed(h):
    view = h.view(2, 8)
    view.mul_(2)
    return view, view.detach(), h.exp()


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.make = make

    def forward(self, x):
        return self.make(torch.tanh(self.layer(x)) * 2)


@pytest.mark.parametrize("make", [view_and_constant, constant_first, whole_too, changed])
def test_a_view_that_is_returned_detached_as_well_has_its_gradient(make):
    case = Case("returning", lambda: Returning(make), lambda: (torch.randn(4, 4),), sum)
    found = []
    for model in (case.remat(), case.model()):
        outputs = model(*case.args())
        sum((o * o.detach().cos()).sum() for o in outputs if o.requires_grad).backward()
        found.append([*outputs, *(parameter.grad for parameter in model.parameters())])
    for got, expected in zip(*found, strict=True):
        assert got.requires_grad == expected.requires_grad
        assert torch.equal(got, expected)
