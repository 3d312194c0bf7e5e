"""Models that read what they return, and ways to ask for its gradient."""

import pytest
import torch
from torch import nn

import remat
from remat_exec import BackwardError


class Reading(nn.Module):
    """Returns a hidden layer, and what `read` makes of it."""

    def __init__(self, read):
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 8)
        self.double()
        self.read = read

    def forward(self, x):
        return self.read(self, self.hidden(x))


def breaking(m, h):
    h = m.head(h)
    after = h + 1  # eager does not keep its input
    torch._dynamo.graph_break()
    return h, m.head(torch.tanh(after))


def drawing(m, h):
    dropped = nn.functional.dropout(h, 0.5)
    return dropped, m.head(nn.functional.dropout(dropped, 0.5))


def changing_in_place(m, h):
    other = h * 2
    h.add_(1)
    other[:, 0].mul_(2)
    return h, m.head(torch.tanh(h) + other)


def batched(m, h):
    """Tensors within `vmap` have no memory, and leave it only together."""
    h, other = torch.vmap(lambda row: (torch.tanh(row), row * 2))(h)
    return h, torch.vmap(lambda row: m.head(row).exp())(h) + other


def of_an_inner_region(m, h):
    h = torch.tanh(h)
    torch._dynamo.graph_break()
    h = m.head(h)
    out = (h.exp(), h.cos())
    torch._dynamo.graph_break()
    return h, out[0] * out[1].sum()


def a_part_of_a_view(m, h):
    first = h.view(2, 2, 8)[:, 0]
    return first, m.head(first.exp()).sum(0), h


def in_contexts(m, h):
    with torch.autocast("cpu", enabled=False):
        h = h * 2
    left, right = h.split(4, 1)
    with torch.no_grad():
        constant = left.sum()
    return h, m.head(nn.functional.dropout(h, 0.5)) * constant + right.sum()


def one_of_another(m, h):
    hidden = torch.tanh(h)
    after = m.head(hidden)
    return hidden, after.cos(), after


READS = {
    "whole": lambda m, h: (h, m.head(torch.tanh(h))),
    "twice": lambda m, h: (h, m.head(h) * h.cos() + h),
    "a view": lambda m, h: (h.view(-1), m.head(torch.tanh(h))),
    "a part of a view": a_part_of_a_view,
    "one of another": one_of_another,
    "in contexts": in_contexts,
    "drawing": drawing,
    "changing in place": changing_in_place,
    "a break": breaking,
    "an inner region": of_an_inner_region,
    "batched": batched,
}


def total(outputs):
    return sum(output.square().sum() for output in outputs)


def see(seen):
    """Make a hook that reads what it is given."""
    return lambda *given: seen.extend(g + 0 for g in given[-1] if g is not None)


def by_hook(outputs, module):
    seen = []
    outputs[0].register_hook(lambda grad: seen.append(grad + 0))
    total(outputs).backward()
    return seen


def by_changing(outputs, module):
    outputs[0].register_hook(lambda grad: 3 * grad)
    total(outputs).backward()
    return []


def by_retaining(outputs, module):
    for output in outputs:
        output.retain_grad()
    total(outputs).backward()
    return [output.grad + 0 for output in outputs]


def by_asking(outputs, module):
    return [g + 0 for g in torch.autograd.grad(total(outputs), outputs)]


def by_asking_for_others(outputs, module):
    asked = [outputs[0], module.hidden.weight]
    return [g + 0 for g in torch.autograd.grad(total(outputs), asked)]


def by_edge(outputs, module):
    edge = torch.autograd.graph.get_gradient_edge(outputs[0])
    found = torch.autograd.grad(total(outputs), [module.hidden.weight, edge])
    return [g + 0 for g in found]


def by_inputs(outputs, module):
    total(outputs).backward(inputs=[outputs[0], module.hidden.weight])
    return [outputs[0].grad + 0]


def by_hook_of_node(outputs, module):
    seen = []
    outputs[0].grad_fn.register_prehook(see(seen))
    total(outputs).backward()
    return seen


def by_hook_after_node(outputs, module):
    seen = []
    outputs[0].grad_fn.register_hook(see(seen))
    total(outputs).backward()
    return seen


def by_hook_of_several(outputs, module):
    seen = []
    torch.autograd.graph.register_multi_grad_hook(outputs, see(seen))
    total(outputs).backward()
    return seen


def of_the_inner_part_alone(outputs, module):
    outputs[0].retain_grad()
    outputs[1].sum().backward()
    return [] if outputs[0].grad is None else [outputs[0].grad + 0]


def by_none(outputs, module):
    total(outputs).backward()
    return []


ASKS = [
    by_hook,
    by_changing,
    by_retaining,
    by_asking,
    by_asking_for_others,
    by_edge,
    by_inputs,
    by_hook_of_node,
    by_hook_after_node,
    by_hook_of_several,
    of_the_inner_part_alone,
    by_none,
]


def asked(model, module, x, ask):
    """Give what is found by one who asks, and all gradients after it."""
    module.zero_grad()
    torch.manual_seed(0)
    found = ask(model(x), module)
    return [*found, *(parameter.grad for parameter in module.parameters())]


def assert_eagers(model, module, x, ask):
    got, expected = (asked(one, module, x, ask) for one in (model, module))
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-12)


def refused_until_planned(model, module, x, ask):
    """Ask until autograd has whole gradients, and say how often that was refused."""
    for refused in range(4):
        try:
            asked(model, module, x, ask)
        except BackwardError as error:
            message = str(error)
        else:
            return refused
        assert "run forward again" in message
    pytest.fail("it is refused for good")


def rematerialized(model, x, **options):
    return remat.rematerialize(model, (x,), **{"budget": "1GiB", "costs": "estimate", **options})


def compiled(model, x):
    torch._dynamo.reset()
    return torch.compile(model, backend="remat", options={"budget": "1GiB", "costs": "estimate"})
