"""What the user gets behaves under autograd as what eager gives."""

import functools

import pytest
import torch
from exec_cases.models import HEADS, MLP, Case
from torch import nn


class Views(nn.Module):
    """Returns what `pick` makes of the hidden layer and of the input."""

    def __init__(self, pick):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.pick = pick

    def forward(self, x):
        return self.pick(torch.tanh(self.layer(x)), x, self.layer.weight)


@functools.cache
def case_of(pick, input_grad):
    """Make a case, which is captured once for all uses."""

    def args():
        return (torch.randn(4, 6).requires_grad_(input_grad),)

    return Case("views", lambda: Views(pick), args, lambda y: y.sum())


def run(pick, use, *, input_grad=False):
    """Run the same forward, use and backward by a plan and by eager; give both sides' results."""
    found = []

    case = case_of(pick, input_grad)
    for model in (case.remat(), case.model()):
        (x,) = case.args()
        value = use(model(x))
        value.backward()
        found.append([value.detach(), x.grad, *(p.grad for p in model.parameters())])
    for got, expected in zip(*found, strict=True):
        if expected is None:
            assert got is None
        else:
            torch.testing.assert_close(got, expected)


PICKS = {
    "slices": lambda h, x, w: (h[:, :2], h[:, 2:]),
    "slices and base": lambda h, x, w: (h[:, :2], h),
    "base and transpose": lambda h, x, w: (h, h.t()),
    "chunks": lambda h, x, w: h.chunk(3, dim=1),
    "unbound": lambda h, x, w: h.unbind(1),
    "expanded": lambda h, x, w: (h[:, None].expand(4, 3, 6), h.flatten()),
    "a row expanded": lambda h, x, w: (h[0].expand(4, 6), h[1].sum()),
    "a chunk expanded": lambda h, x, w: (h.chunk(2, 1)[1].expand(2, 4, 3), h.chunk(2, 1)[0]),
    "overlapping windows": lambda h, x, w: (h.view(-1).unfold(0, 12, 8), h.sum()),
    "diagonal": lambda h, x, w: (h.diagonal(), h.view(2, 12)),
    "input": lambda h, x, w: (h, x),
    "view of input": lambda h, x, w: (h, x[:, 1:3]),
    "parameter": lambda h, x, w: (h, w),
    "view of parameter": lambda h, x, w: (h, w.t()[1:]),
    "twice": lambda h, x, w: (h, h),
    "detached": lambda h, x, w: (h, h.detach().exp() + h),
    "scalar": lambda h, x, w: (h.sum(), h[0, 0]),
}


@pytest.mark.parametrize(
    ("name", "input_grad"),
    [  # with a gradient of the input every second, the others in a sweep
        pytest.param(name, grad, marks=pytest.mark.sweep if grad and at % 2 else ())
        for at, name in enumerate(PICKS)
        for grad in (False, True)
    ],
)
def test_outputs_of_every_kind(name, input_grad):
    run(
        PICKS[name],
        lambda outputs: sum((i + 1) * o.square().sum() for i, o in enumerate(outputs)),
        input_grad=input_grad,
    )


@pytest.mark.parametrize("pick", PICKS.values(), ids=PICKS)
@pytest.mark.parametrize("position", [0, 1])
def test_a_loss_over_one_of_the_outputs(pick, position):
    run(pick, lambda outputs: outputs[position].exp().sum(), input_grad=True)


@pytest.mark.parametrize("name", ["slices and base", "base and transpose", "diagonal", "expanded"])
def test_outputs_that_are_views_see_a_change_of_one_another(name):
    def use(outputs):
        first, second = outputs
        if name == "expanded":
            second.mul_(3)
        else:
            first.mul_(3)
        return (first * second.sum()).sum()

    run(lambda h, x, w: PICKS[name](2 * h, x, w), use)


def test_an_output_may_be_changed_in_place():
    def use(output):
        output.mul_(2)
        output[:, 0] = 1.0
        return output.square().sum()

    run(lambda h, x, w: h * 1.0, use)


def hidden(h, x, w):
    return h


def test_an_output_that_backward_reads_may_not_be_changed_in_place():
    case = Case("tanh", lambda: Views(hidden), lambda: (torch.randn(4, 6),),
                lambda y: y.sum())  # fmt: skip
    for model in (case.remat(), case.model()):
        output = model(*case.args())
        output.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace|changed in place"):
            output.sum().backward()


def test_the_input_itself_comes_back():
    case = Case("input", lambda: Views(PICKS["input"]), lambda: (torch.randn(4, 6),),
                lambda outputs: outputs[0].sum())  # fmt: skip
    (x,) = case.args()
    assert case.remat()(x)[1] is x


def test_outputs_without_a_gradient():
    output = HEADS.remat()(*HEADS.args())
    assert output["left"].requires_grad
    assert output["right"].requires_grad
    assert not output["index"].requires_grad
    assert output["index"].dtype == torch.int64
    assert torch.equal(output["index"], HEADS.model()(*HEADS.args())["index"])


def test_outputs_made_without_gradients_have_none():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            y = self.layer(x)
            with torch.no_grad():
                spread = y.std()
            return y, spread, y.detach()

    case = Case("both", Both, lambda: (torch.randn(4, 6),), lambda outputs: outputs[0].sum())
    outputs = case.remat()(*case.args())
    assert [output.requires_grad for output in outputs] == [True, False, False]
    assert outputs[2].data_ptr() == outputs[0].data_ptr()
    case.loss(outputs).backward()


def test_the_structure_of_the_output_is_kept():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            y = self.layer(x)
            return {"y": y, "n": 3, "none": None, "list": [y.exp(), ("text", y.sum())]}

    case = Case("mixed", Mixed, lambda: (torch.randn(4, 6),), lambda out: out["list"][1][1])
    output = case.remat()(*case.args())
    assert list(output) == ["y", "n", "none", "list"]
    assert (output["n"], output["none"], output["list"][1][0]) == (3, None, "text")
    assert isinstance(output["list"], list)
    assert isinstance(output["list"][1], tuple)
    case.loss(output).backward()


def test_an_output_can_be_kept_after_backward():
    model = MLP.remat()
    output = model(*MLP.args())
    before = output.detach().clone()
    MLP.loss(output).backward()
    assert torch.equal(output, before)


class ChangesAView(nn.Module):
    """Returns a view of the input, which is changed in place through another."""

    def __init__(self, view):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.view = view

    def forward(self, x):
        viewed = self.view(x)
        x.view_as(x).mul_(x)
        viewed.add_(1)
        return self.layer(x), viewed


INPUTS = {
    "contiguous": lambda: torch.arange(24.0).view(4, 6),
    "with gaps": lambda: torch.arange(48.0).view(4, 12)[:, ::2],
    "transposed": lambda: torch.arange(24.0).view(6, 4).t(),
    "further on": lambda: torch.arange(40.0)[16:].view(4, 6),  # 64 bytes: products see alignment
}
VIEWS = {
    "all": lambda x: x.view_as(x),
    "transposed": lambda x: x.t(),
    "a part": lambda x: x[1:, 2:5],
    "every second": lambda x: x[::2].t(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("made", INPUTS.values(), ids=INPUTS)
def test_a_view_of_an_input_that_is_changed_lies_where_it_does_in_eager(made, view):
    case = Case("view", lambda: ChangesAView(view), lambda: (made(),), lambda y: y[0].sum())
    found = []
    for model in (case.remat(), case.model()):
        x = made()
        output, viewed = model(x)
        assert viewed.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        found.append((output.detach(), viewed.clone(), x, viewed.stride(), viewed.storage_offset()))
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected) if isinstance(got, torch.Tensor) else got == expected
