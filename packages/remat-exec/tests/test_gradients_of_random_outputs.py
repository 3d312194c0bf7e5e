"""Models that compute random tensors of others: asked for gradients in turn, right or refused."""

import itertools
import random

import pytest
import torch
from exec_cases.models import Case
from torch import nn

from remat_exec import BackwardError


class Drawn(nn.Module):
    """Computes several tensors from others of them, as drawn, and returns some."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.steps = [(draw.randrange(10), draw.random(), draw.random()) for _ in range(6)]
        self.returned = draw.sample(range(7), draw.randrange(2, 5))

    def forward(self, x):
        made = [torch.tanh(self.first(x))]
        for kind, one, other in self.steps:
            a, b = made[int(one * len(made))], made[int(other * len(made))]
            match kind:
                case 0:
                    result = self.second(a)
                case 1:
                    result = a * b.cos()
                case 2:
                    result = a + b
                case 3:
                    result = a.t()
                case 4:
                    result = a.view(2, 2, 4)[:, 1].repeat(2, 1) + b
                case 5:
                    result = a.detach() * b
                case 6:
                    result = a.view(4, 4)
                case 8:
                    result = a.chunk(2)[1].repeat(2, 1)
                case 9:
                    result = a.split(4)[0]
                case 7:
                    result = torch.where(a > 0, a, b)
            made.append(result)
        return [made[at] for at in self.returned]


def asked_in_turn(outputs, module, at, ask):
    """Give what one asks who sees the gradient of the output there, and all gradients after it."""
    found = []
    output = outputs[at]
    if ask == 0:
        output.register_hook(lambda grad: found.append(grad + 0))
    if ask == 1:
        output.register_hook(lambda grad: 3 * grad)
    if ask == 2:
        output.retain_grad()
    loss = sum((output * output.detach().cos()).sum() for output in outputs)
    if ask == 3:
        found += torch.autograd.grad(loss, [output, module.first.weight])
    else:
        loss.backward()
    found += [output.grad] if ask == 2 else []
    found += [parameter.grad for parameter in module.parameters()]
    return [None if each is None else each + 0 for each in found]


def nodes_behind(tensor):
    """List the nodes of autograd's graph that lead to a tensor."""
    seen, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


def is_read(outputs, at):
    """Whether another output is computed from one, or from a view of the same memory."""
    base = outputs[at] if outputs[at]._base is None else outputs[at]._base
    alike = [o for o in outputs if o is base or o._base is base]
    own = {tensor.grad_fn for tensor in (base, *alike)}
    others = (o for o in outputs if o is not outputs[at])
    return any((own - {o.grad_fn}) & nodes_behind(o) for o in others)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(6, 24))]
)
def test_no_gradient_of_a_drawn_model_is_wrong_without_a_word(seed):
    case = Case("drawn", lambda: Drawn(seed).double(), lambda: (torch.randn(4, 4).double(),), sum)
    for at, ask in itertools.product(range(len(Drawn(seed).returned)), range(5)):
        eager, planned = case.model(), case.remat()
        expected = asked_in_turn(eager(*case.args()), eager, at, ask)
        try:
            got = asked_in_turn(planned(*case.args()), planned.module, at, ask)
        except BackwardError as error:
            got, refusal = None, str(error)
        if got is None:
            assert "is asked for" in refusal
            assert ask != 4
            assert is_read(eager(*case.args()), at)
            continue
        assert len(got) == len(expected)
        assert all(
            b is None if a is None else torch.allclose(a, b, rtol=1e-12)
            for a, b in zip(got, expected, strict=True)
        )
