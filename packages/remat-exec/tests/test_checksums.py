"""Checksums see every change of a tensor, and none of what is not its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat_exec import MemoryChanged
from remat_exec.checksums import _as_integers, _dense, _sum_on_device, check, checksum, note

TYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64,
    torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


def on_device(tensor):
    """Sum up as is done where there is no numpy, on the CPU."""
    return int(_sum_on_device(_dense(_as_integers(tensor.detach()))))


@pytest.mark.parametrize("summed", [checksum, on_device])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_bit_that_flips_is_seen_in_any_type(dtype, summed):
    tensor = torch.randn(13, 7).to(dtype)
    bits = tensor.untyped_storage()
    before = summed(tensor)
    assert before == summed(tensor)
    for at in (0, len(bits) // 2, len(bits) - 1):
        bits[at] ^= 1
        assert summed(tensor) != before
        bits[at] ^= 1
    assert summed(tensor) == before


LAYOUTS = {
    "transposed": lambda t: t.t(),
    "rows": lambda t: t[::2],
    "columns": lambda t: t[:, 1::3],
    "a block": lambda t: t[3:-3, 5:-5],
    "not aligned": lambda t: t.view(-1)[1:],
    "expanded": lambda t: t[:, :1].expand(-1, 5),
    "overlapping": lambda t: t.view(-1).as_strided((50, 8), (2, 1)),
    "no numbers": lambda t: t[:0],
    "one number": lambda t: t[3, 4],
}


@pytest.mark.parametrize("summed", [checksum, on_device])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_lies_beside_a_view_is_not_seen(layout, summed):
    tensor = torch.randn(300, 100)
    view = layout(tensor)
    own = torch.zeros_like(tensor, dtype=torch.bool)
    layout(own).fill_(True)
    before = summed(view)
    tensor[~own] += 1
    assert summed(view) == before
    for at in own.nonzero()[[0, -1] if own.any() else []].tolist():
        tensor[tuple(at)] += 1
        assert summed(view) != before
        tensor[tuple(at)] -= 1


@pytest.mark.parametrize("summed", [checksum, on_device])
@given(st.integers(2, 300), st.integers(1, 90), st.randoms(use_true_random=False), st.booleans())
def test_rows_that_change_places_are_seen(summed, rows, columns, drawn, is_small):
    tensor = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    tensor = tensor.to(torch.uint8) if is_small else tensor
    other = tensor.clone()
    order = drawn.sample(range(rows), rows)
    same = torch.equal(tensor[order], tensor)
    assert (summed(tensor[order]) == summed(other)) == same


LARGE = torch.randn(512, 2**10 + 1)
COPIED = {
    "one piece": LARGE,
    "transposed": LARGE.t(),
    "columns": LARGE[:, :-1],
    "expanded": LARGE[:1, :512].expand(600, -1),
    "no whole words": LARGE.view(-1)[:-1],
    "not at a word": LARGE.view(-1)[1:],
    "bytes": LARGE.view(torch.uint8).view(-1)[1:-2],
    "conjugated": torch.view_as_complex(LARGE.view(-1, 2)).conj(),
    "few": LARGE[:3, :-1].t(),
}


@pytest.mark.parametrize("tensor", COPIED.values(), ids=COPIED)
def test_a_copy_has_the_same_sum_by_its_elements_and_on_every_device(tensor):
    expected = checksum(tensor, by_elements=True)
    assert expected == checksum(torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor))
    plain = tensor if tensor.is_conj() else _as_integers(tensor)
    assert expected == int(_sum_on_device(plain)) % 2**64
    assert checksum(tensor) == on_device(tensor) % 2**64


def test_sums_on_a_device_take_eight_mebibytes_at_most():
    from remat_exec import measure_peak

    tensor = torch.randn(2048, 2048)
    on_device(tensor)  # the factors stay
    for each in (tensor, tensor.t(), tensor[:, :-1], tensor.view(-1)[1:]):
        with measure_peak("cpu") as peak:
            on_device(each)
            _sum_on_device(_as_integers(each))
        assert peak.peak_bytes <= 8 * 2**20


def test_what_changed_is_named():
    a, b = torch.ones(3), torch.ones(2, 4)
    states = {}
    note(states, a=a, b=b)
    check(states, b=b, a=a)
    b.numpy()[1] = 7
    with pytest.raises(MemoryChanged, match=r"\(b, of shape \[2, 4\], in its code\)"):
        check(states, a=a, b=b)


def test_storages_can_be_resized_after_it():
    """FSDP frees them so."""
    tensor = torch.ones(8)
    checksum(tensor)
    tensor.untyped_storage().resize_(0)
    assert checksum(tensor) == checksum(torch.ones(0))


def test_nothing_is_taken_of_torchs_memory():
    from remat_exec import measure_peak

    tensors = [torch.randn(1 << 17), torch.randn(1 << 17).view(256, 512).t(), torch.ones(77)[1:]]
    with measure_peak() as peak:
        for tensor in tensors:
            checksum(tensor)
    assert peak.peak_bytes == 0
