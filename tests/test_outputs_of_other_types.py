"""Outputs that read memory as another type, or conjugated, are eager's, and so are gradients."""

import copy

import pytest
import torch
from torch import nn

import remat


class Rounded(torch.autograd.Function):
    """Drops the low half of each number, and hands gradients through."""

    @staticmethod
    def forward(ctx, x):
        return x.view(torch.int32).bitwise_and(-65536).view(torch.float32)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Model(nn.Module):
    """Returns what `read` makes between two layers; `broken` begins another region after it."""

    def __init__(self, read, broken):
        super().__init__()
        self.read, self.broken = read, broken
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("pairs", torch.arange(8.0).view(4, 2))
        self.register_buffer("numbers", torch.view_as_complex(torch.arange(8.0).view(4, 2)))

    def forward(self, x):
        hidden, *others = self.begin(x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.last(hidden), *others

    def begin(self, x):
        return self.read(self, self.first(x))


class Changing(Model):
    """Changes its input in place, and returns views of that."""

    def begin(self, x):
        x.mul_(0.5)
        return self.first(x), *self.read(x)


def looks(tensor):
    return tensor.dtype, tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.requires_grad


def loss_of(outputs):
    reals = [torch.view_as_real(out.resolve_conj()) if out.is_complex() else out for out in outputs]
    return sum((out * out.detach().cos()).sum() for out in reals if out.is_floating_point())


def check(read, broken, *, kind=Model, rows=(3, 3, 3), change=None):
    """Train beside eager, and change what is returned in between."""
    torch.manual_seed(0)
    plain = kind(read, broken)
    model = remat.rematerialize(
        copy.deepcopy(plain), budget="1MB", limit_seconds=0.1, costs="estimate"
    )
    for count in rows:
        x = torch.randn(count, 4)
        for each in (plain, model):
            each.zero_grad()
        expected, got = plain(x.clone()), model(x.clone())
        for one, other in zip(got, expected, strict=True):
            assert looks(one) == looks(other)
            assert torch.equal(one, other)
        if change is not None:
            change(expected[1])
            change(got[1])
        loss_of(expected).backward()
        loss_of(got).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            torch.testing.assert_close(one.grad, other.grad)
        for one, other in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(one, other)


def rounded(m, h):
    return (Rounded.apply(h),)


def rounded_and_returned(m, h):
    q = Rounded.apply(h)
    return q, q


def rounded_and_viewed(m, h):
    q = Rounded.apply(h)
    return q, q.view(-1), q[1:].t()


def rounded_in_place(m, h):
    h.view(torch.int32).bitwise_and_(-65536)
    return h, h


def changed_through_a_view(m, h):
    view = h.view(torch.float32)
    view.add_(1)
    return h, view


ROUNDED = [
    rounded,
    rounded_and_returned,
    rounded_and_viewed,
    rounded_in_place,
    changed_through_a_view,
]


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("read", ROUNDED)
def test_a_view_as_another_type_has_its_gradient(read, broken):
    check(read, broken)


def rounded_beside(m, h):
    return h, Rounded.apply(h)


def rounded_and_viewed_beside(m, h):
    return h, Rounded.apply(h).view(-1)


@pytest.mark.parametrize("broken", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("read", [rounded_beside, rounded_and_viewed_beside])
def test_a_view_as_another_type_may_be_changed_in_place(read, broken):
    check(read, broken, change=lambda out: out.mul_(2))


def halved(buffer, view):
    def read(m, h):
        getattr(m, buffer).mul_(0.5)
        return h, view(getattr(m, buffer))

    return read


def doubled_through_it(buffer, view):
    def read(m, h):
        y = view(getattr(m, buffer))
        y.mul_(2)
        return h, y

    return read


VIEWS = {
    "conjugated": ("numbers", torch.conj),
    "a part conjugated": ("numbers", lambda z: z.conj()[1:]),
    "its imaginary part": ("numbers", lambda z: z.conj().imag),
    "as pairs": ("numbers", torch.view_as_real),
    "as complex": ("pairs", torch.view_as_complex),
    "as integers": ("pairs", lambda z: z.view(torch.int32)),
    "as halves": ("pairs", lambda z: z.view(torch.bfloat16)),
    "negated": ("pairs", torch._neg_view),
}


@pytest.mark.parametrize("broken", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_buffer_that_changes_reads_it_as_eager_does(view, broken):
    check(halved(*VIEWS[view]), broken)


@pytest.mark.parametrize("view", ["conjugated", "as complex", "negated"])
def test_a_buffer_that_changes_through_a_view_is_read_as_eager_does(view):
    check(doubled_through_it(*VIEWS[view]), broken=False)


def views_of_an_input(x):
    return torch.view_as_complex(x.view(-1, 2)), torch._neg_view(x)[1:], x.view(torch.int32)


@pytest.mark.parametrize("broken", [False, True])
def test_a_view_of_an_input_that_changes_is_read_as_eager_does(broken):
    check(views_of_an_input, broken, kind=Changing)


def test_such_views_are_right_at_other_sizes():
    rows = (4, 4, 6, 8, 10, 6)
    check(views_of_an_input, broken=False, kind=Changing, rows=rows)
    check(rounded_and_viewed, broken=True, rows=rows)


def test_a_view_of_a_buffer_that_changes_shares_its_memory():
    torch.manual_seed(0)
    model = Model(halved(*VIEWS["as complex"]), broken=False)
    run = remat.rematerialize(model, budget="1MB", limit_seconds=0.1, costs="estimate")
    _, view = run(torch.randn(3, 4))
    assert view.data_ptr() == model.pairs.data_ptr()
    view.zero_()
    assert not model.pairs.any()
