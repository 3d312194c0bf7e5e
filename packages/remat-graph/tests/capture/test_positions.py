"""An index that is a tensor of one number is traced as an index, unless a copy would not do."""

import pytest
import torch
from torch import nn

from remat_graph.torch import CaptureError, capture
from remat_graph.torch.tracing.positions import positions_as_indices

SHAPE = (3, 4, 5)

READS = {
    "first axis": lambda x, p: x[p],
    "second axis": lambda x, p: x[:, p],
    "last axis": lambda x, p: x[..., p],
    "negative": lambda x, p: x[-p],
    "of 32 bits": lambda x, p: x[p.int()],
    "of 16 bits": lambda x, p: x[p.short()],
    "two": lambda x, p: x[p, ..., p - 1],
    "new axes": lambda x, p: x[None, p, None, :, 1],
    "steps": lambda x, p: x[::2, p, 1:3],
    "numbers beside": lambda x, p: x[1, p],
    "beside indices": lambda x, p: x[torch.arange(3), p],
    "between indices": lambda x, p: x[torch.arange(3), p, torch.arange(3)],
    "beside a mask": lambda x, p: x[p, torch.ones(4, 5, dtype=torch.bool).triu()],
    "list of lists": lambda x, p: x[[0, 2], p],
}  # fmt: skip


def write_row(x, p):
    x[p] = torch.arange(5.0)


def write_another_type(x, p):
    x[p] = torch.arange(5)


def write_number(x, p):
    x[:, p, 1:] = 2.0


def write_axes(x, p):
    x[..., p] = torch.arange(3.0)[:, None]


def add(x, p):
    x[:, p] += torch.arange(5.0)


WRITES = {
    each.__name__: each for each in (write_row, write_another_type, write_number, write_axes, add)
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_are_those_of_eager(read):
    tensors = [torch.randn(SHAPE, requires_grad=True) for _ in range(2)]
    tensors[1].data.copy_(tensors[0].data)
    expected = read(tensors[0], torch.tensor(2))
    with positions_as_indices() as check:
        found = read(tensors[1], torch.tensor(2))
    check([], [])
    assert torch.equal(found, expected)
    for result in (expected, found):
        result.square().sum().backward()
    assert torch.equal(tensors[1].grad, tensors[0].grad)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_are_those_of_eager(write):
    found, expected = torch.ones(SHAPE), torch.ones(SHAPE)
    write(expected, torch.tensor(1))
    with positions_as_indices() as check:
        write(found, torch.tensor(1))
    check([found], [found])
    assert torch.equal(found, expected)


class At(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Linear(5, 5)

    def forward(self, x, position):
        return self.function(self.layer(x), position)


def capture_of(function):
    return capture(At(function), (torch.randn(SHAPE), torch.tensor(1)), costs="estimate")


def written(function):
    def forward(x, p):
        x = x.clone()
        function(x, p)
        return x

    return forward


@pytest.mark.parametrize("function", [*READS.values(), *map(written, WRITES.values())])
def test_what_the_mode_does_is_traced(function):
    if function is READS["beside a mask"]:
        pytest.skip("what a mask reads has no known size")
    capture_of(function)


def test_the_position_may_change_afterwards():
    def forward(x, p):
        p = p.clone()
        row = x[p]
        p += 1
        return row * x[p]

    capture_of(forward)


def writes_what_was_read(x, p):
    row = x[p]
    row.mul_(2)
    return x.sum() + row


def writes_a_part_of_what_was_read(x, p):
    row = x[p]
    row[0].zero_()
    return x.sum() + row


def writes_what_it_was_read_of(x, p):
    x = x.clone()
    row = x[p]
    x.mul_(2)
    return row


def writes_in_turn(x, p):
    x = x.clone()
    row = x[p]
    x.mul_(2)
    row += 1
    x[p] = row
    return x


def writes_another(x, p):
    x = x.clone()
    row = x[p]
    x[p - 1] = 0.0
    return x, row


def writes_later(x, p):
    x = x.clone()
    row = x[p]
    row += 1
    x[p] = row
    row.mul_(2)
    return x


def writes_what_autograd_does_not_count(x, p):
    x = x.clone()
    x[p].data.mul_(2)
    return x


def writes_the_data_of_what_it_was_read_of(x, p):
    x = x.clone()
    row = x[p]
    x.data.mul_(2)
    return x + row


def writes_several(x, p):
    x = x.clone()
    torch._foreach_mul_([x[p]], 2.0)
    return x


def writes_statistics(x, p):
    means = x.detach()[0].clone()
    y = nn.functional.batch_norm(x[0], means[p], torch.ones(5), training=True)
    return y + means.sum()


def reads_before_it_writes_back(x, p):
    x = x.clone()
    row = x[p]
    row += 1
    total = x.sum()
    x[p] = row
    return x * total


def reads_between_two_sums(x, p):
    x = x.clone()
    row = x[p]
    row += 1
    row += x.sum()
    x[p] = row
    return x


def writes_back_elsewhere(x, p):
    x, p = x.clone(), p.clone()
    row = x[p]
    p -= 1
    row += 1
    x[p] = row
    return x


def returns_it_and_what_it_is_of(x, p):
    x = x * 2
    return x, x[:, p]


def returns_a_part_of_it_and_what_it_is_of(x, p):
    x = x * 2
    return x[1:], x[p, 0]


def returns_two_views(x, p):
    x = x * 2
    return x[p], x[p - 1]


class OfAnInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x, p):
        return x[p], self.weight * 2


class OfAParameter(OfAnInput):
    def forward(self, x, p):
        return x * 2, self.weight[p]


class OfAPartOfAnInput(OfAnInput):
    def forward(self, x, p):
        return x[p][p], self.weight * 2


class OfADetachedInput(OfAnInput):
    def forward(self, x, p):
        return x.detach()[p], self.weight * 2


@pytest.mark.parametrize(
    "module", [OfAnInput(), OfAParameter(), OfAPartOfAnInput(), OfADetachedInput()]
)
def test_what_is_returned_is_no_view_of_what_the_caller_has(module):
    with pytest.raises(CaptureError, match=r"reads tensor\[position\] at .* returns it"):
        capture(module, (torch.randn(SHAPE), torch.tensor(1)), costs="estimate")


@pytest.mark.parametrize(
    "function",
    [returns_it_and_what_it_is_of, returns_a_part_of_it_and_what_it_is_of, returns_two_views],
)
def test_what_is_returned_is_no_view_of_what_else_is_returned(function):
    with pytest.raises(CaptureError, match=r"reads tensor\[position\] at .* returns it"):
        capture_of(function)


@pytest.mark.parametrize(
    "function",
    [
        writes_what_was_read,
        writes_a_part_of_what_was_read,
        writes_what_it_was_read_of,
        writes_in_turn,
        writes_another,
        writes_later,
        writes_what_autograd_does_not_count,
        writes_the_data_of_what_it_was_read_of,
        writes_several,
        writes_statistics,
        reads_before_it_writes_back,
        reads_between_two_sums,
        writes_back_elsewhere,
    ],
)
def test_where_eager_would_see_a_write_through_the_view_it_is_refused(function):
    with pytest.raises(
        CaptureError, match=r"reads tensor\[position\] at .*test_positions.py:\d+, .* afterwards"
    ):
        capture_of(function)
