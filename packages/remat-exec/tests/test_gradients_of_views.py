"""Views among the outputs have the gradients that eager gives them."""

import pytest
import torch
from exec_cases.models import Case
from exec_cases.reading import Reading

from remat_exec import BackwardError


def views_of_views(module, hidden):
    view = hidden.view(2, 16)
    return view.t(), view[0], view, view.t()[:5]


def views_in_a_row(module, hidden):
    view = hidden.view(2, 16)
    return view, view.t(), hidden.view(2, 16)[:, 3:]


class Viewing(Reading):
    """Returns views of a hidden layer."""

    def forward(self, x):
        return self.read(self, torch.tanh(self.hidden(x)))


@pytest.mark.parametrize("read", [views_of_views, views_in_a_row])
def test_views_of_an_output_add_to_its_gradient(read):
    case = Case("viewing", lambda: Viewing(read), lambda: (torch.randn(4, 6),), sum)
    for at in range(len(read(None, torch.ones(4, 8)))):
        found = []
        for model in (case.remat(), case.model()):
            outputs = model(*case.args())
            outputs[at].retain_grad()
            sum((output * output.detach().cos()).sum() for output in outputs).backward()
            found.append(outputs[at].grad + 0)
        torch.testing.assert_close(*found)


def as_complex(hidden):
    return torch.complex(hidden[:, :4], hidden[:, 4:])


def read_as(view, of=torch.clone):
    """Read a view of what is `of` a hidden layer, and that itself; return both."""

    def read(module, hidden):
        whole = of(hidden)
        part = view(whole)
        return part, part.abs().sin().sum() + whole.abs().exp().sum(), whole

    return read


@pytest.mark.parametrize(
    "read",
    [
        read_as(lambda h: h.view(4, 2, 4)),
        read_as(lambda h: h.view(4, 2, 4).transpose(1, 2)),
        read_as(lambda h: torch.view_as_complex(h.view(4, 4, 2))),
        read_as(torch.view_as_real, as_complex),
        read_as(lambda h: h.as_strided((3, 4), (8, 1), 4)),
    ],
    ids=["view", "transposed", "complex", "real", "strided"],
)
def test_what_comes_to_a_view_from_outside_may_lie_in_another_way(read):
    case = Case("viewing", lambda: Viewing(read), lambda: (torch.randn(4, 6),), sum)
    found = []
    for model in (case.remat(), case.model()):
        part, loss, whole = model(*case.args())
        for output in (part, whole):
            turned = output.transpose(0, -1)
            weights = torch.arange(1.0, 1 + turned.numel()).view(turned.shape)
            loss = loss + (turned.abs() * weights).sum()
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found)


def a_view_that_is_read(module, x):
    view = x.view(2, 12)
    return view, module.hidden(view.view(4, 6))


def a_view_that_is_not(module, x):
    return x.view(2, 12), module.hidden(x)


class ViewingInputs(Reading):
    """Returns a view of what it is given, and what it makes of that."""

    def forward(self, x):
        return self.read(self, x)


@pytest.mark.parametrize("of_leaf", [False, True])
@pytest.mark.parametrize("read", [a_view_that_is_read, a_view_that_is_not])
@pytest.mark.parametrize("asks", [False, True])
def test_views_of_inputs_are_outputs_like_others(read, of_leaf, asks):
    def make_args():
        return (torch.randn(4, 6, requires_grad=True),)

    case = Case("viewing", lambda: ViewingInputs(read), make_args, sum)
    found = []
    for model in (case.remat(), case.model()):
        (x,) = case.args()
        view, out = model(x if of_leaf else x * 1)
        if asks:
            view.retain_grad()
        (view.square().sum() + out.square().sum()).backward()
        module = getattr(model, "module", model)
        found.append([x.grad, module.hidden.weight.grad])
        if not asks:
            continue
        if read is a_view_that_is_read and model is not module:
            with pytest.raises(BackwardError, match="output 0 of a region"):
                view.grad + 0
        else:
            found[-1].append(view.grad + 0)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=False))
