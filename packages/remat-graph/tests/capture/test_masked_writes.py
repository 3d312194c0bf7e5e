"""What is written by a mask has a gradient of known size: one operator, with the bits of eager."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from remat_graph.torch import CaptureError, capture
from remat_graph.torch.kernels.masked_writes import (
    gradient_of_values,
    of_whole_masks,
    put_of_whole_masks,
)

aten = torch.ops.aten


class Writing(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write, self.layer, self.token = write, nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x, mask):
        return self.write(self.layer(x), mask, self.token).tanh()


def into_a_view(h, mask, token):
    h[:, 1:][mask[:, 1:]] = token
    return h


def columns(h, mask, token):
    h[:, :, mask[0, :6]] = token[:3, None, None]
    return h


WRITES = {
    "in place": lambda h, mask, token: h.clone().index_put_((mask,), token),
    "apart": lambda h, mask, token: h.index_put((mask,), token),
    "added": lambda h, mask, token: h.index_put((mask,), token, accumulate=True),
    "into a view": into_a_view,
    "one row": lambda h, mask, token: h.index_put((mask,), token[None]),
    "elements": lambda h, mask, token: h.index_put((h > 0,), token.sum()),
    "columns": columns,
    "and an index": lambda h, mask, token: h.index_put((mask[:, 0], torch.tensor([2])), token),
}


def capture_of(write, shape=(3, 8, 6), **options):
    x = torch.randn(shape)
    return capture(Writing(write), (x, torch.rand(shape[:-1]) < 0.5), **options)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_it_is_one_operator(write):
    names = [op.name for op in capture_of(write, costs="estimate").graph.ops]
    assert names.count("gradient_of_values") == 1
    assert not any(name.startswith("index") and "put" not in name for name in names)


def test_what_is_read_by_a_mask_is_refused_as_before():
    with pytest.raises(CaptureError, match="depends on the data"):
        capture_of(lambda h, mask, token: h[mask] * token, costs="estimate")


def test_it_is_planned_for_masks_that_are_true_everywhere():
    made = capture_of(WRITES["apart"], (4, 64, 6)).graph
    (op,) = (op for op in made.ops if op.name == "gradient_of_values")
    assert op.workspace_bytes >= 4 * 64 * (6 * 4 + 2 * 8) - 6 * 4  # rows, and where each is


@st.composite
def writes(draw):
    """A tensor, indices with masks of which some elements are true, and the size of values."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    count = draw(st.integers(2, 3))
    indices, at, some = [], 0, False
    while at < len(sizes):
        dims = draw(st.integers(1, len(sizes) - at))
        space = torch.Size(sizes[at : at + dims]).numel()
        kind = draw(st.sampled_from(["whole", "mask", "numbers"]))
        if kind == "mask" and space >= count:
            mask = torch.zeros(space, dtype=torch.bool)
            mask[draw(st.permutations(range(space)))[:count]] = 1
            indices.append(mask.view(sizes[at : at + dims]))
            at, some = at + dims, True
            continue
        length = draw(st.sampled_from([1, count]))
        numbers = torch.zeros(length, dtype=torch.int64)
        indices.append(numbers if kind == "numbers" else None)
        at += 1
    if not some:
        sizes, indices = [count, *sizes], [torch.ones(count, dtype=torch.bool), *indices]
    while indices[-1] is None and draw(st.booleans()):
        indices.pop()
    tensor = torch.zeros(sizes)
    shape = aten.index(tensor, indices).shape
    values = [draw(st.sampled_from([1, size])) for size in shape]
    return tensor, indices, values[draw(st.integers(0, len(values))) :]


@given(writes())
def test_made_up_masks_have_as_many_elements_as_they_may(write):
    tensor, indices, size = write
    empty = [index if index is None or index.dtype == torch.int64 else torch.zeros_like(index)
             for index in indices]  # fmt: skip
    values = torch.ones(size)
    _, filled, _ = put_of_whole_masks(tensor, empty, values)
    _, as_filled, _ = of_whole_masks(tensor, empty, size)
    assert aten.index_put(tensor, filled, values).shape == tensor.shape
    assert gradient_of_values(tensor, as_filled, size).shape == values.shape
    for index, known, other in zip(filled, indices, as_filled, strict=True):
        if index is not None:
            assert torch.equal(index, other)
            assert index.count_nonzero() >= (known.dtype != torch.int64) * known.count_nonzero()


def test_a_mask_of_one_element_is_true():
    _, (mask,), _ = of_whole_masks(torch.zeros(2, 3), [torch.tensor(False)], (1, 2, 3))
    assert mask.equal(torch.tensor(True))


def test_dimensions_that_no_index_names_are_behind():
    mask, indices = torch.zeros(6, dtype=torch.bool), torch.tensor([2])
    _, (filled, *_), _ = of_whole_masks(torch.zeros(6, 5, 4, 3), [mask, None, indices], (2, 5, 3))
    assert filled.count_nonzero() == 2
