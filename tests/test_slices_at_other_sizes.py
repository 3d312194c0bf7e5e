"""What a program in slices is at another size is read off it: as that size is cut itself."""

from __future__ import annotations

import pytest
import torch
from integration_cases.lengths import Inputs, Language, words
from integration_cases.sized import captures_of
from torch import nn

from remat_graph import Numerics
from remat_graph.torch import CallSizes, SizedCapture
from remat_graph.torch.ways import resizing


def sizes_of(model: nn.Module, *calls: Inputs) -> list[SizedCapture]:
    """Capture them in the ways that rounding allows."""
    captures = captures_of(model, *calls)
    return [each.with_alternatives(Numerics.ROUNDING, laid_out=()) for each in captures]


@pytest.fixture(scope="module")
def lengths() -> list[SizedCapture]:
    """Captures of a language model for lengths that differ."""
    torch.manual_seed(0)
    return sizes_of(Language(), *(words(4, n, n) for n in (70, 60, 51, 127)))


@pytest.mark.parametrize(("kind", "slices"), [(0, 8), (0, 3), (-1, 8), (1, 4)])
def test_a_program_in_slices_is_that_which_other_sizes_are_cut_into(
    kind: int, slices: int, lengths: list[SizedCapture]
) -> None:
    first, *others = lengths
    number = kind % len(first.cuts)
    near = first.in_slices([(number, slices)])
    for other in others:
        read_off = near.at(CallSizes(other.symbols, other.leaves))
        whole = other.in_slices([(number, slices)])
        assert read_off is not None
        assert read_off.sliced == near.sliced
        assert read_off.program == whole.program
        assert read_off.program.equivalence == whole.program.equivalence
        assert read_off.program.generic is not None
        assert [op.name for op in read_off.graph.ops] == [op.name for op in near.graph.ops]
        unsliced = read_off.unsliced
        assert unsliced is not None
        assert unsliced.program == other.program


def test_other_backwards_leave_out_what_a_size_leaves_out() -> None:
    torch.manual_seed(0)
    calls = [words(2, n, n) for n in (70, 60, 51)]
    first, *others = captures_of(Language(both=True), *calls)
    logits = max(
        first.missing.union(first.program.tangents.values()),
        key=lambda at: first.deferred_bytes(frozenset({at})),
    )
    made = first.variant(frozenset({logits}))
    assert isinstance(made, SizedCapture)
    for other in others:
        read_off = made.at(CallSizes(other.symbols, other.leaves))
        assert read_off is not None
        left_out = read_off.with_deferred_outputs(frozenset({logits}))
        for each in (left_out, read_off):
            assert each.over_all_outputs.program.deferred == each.program.deferred
            assert each.over_all_outputs.missing == frozenset()
        assert left_out.variants_are_read_off


@pytest.mark.sweep
def test_what_rules_do_not_allow_for_a_size_is_not_cut_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    first, other, short = sizes_of(Language(), *(words(2, n, n) for n in (70, 60, 52, 3)))
    near = first.in_slices([(0, 8)])
    call = CallSizes(other.symbols, other.leaves)
    assert near.at(CallSizes(short.symbols, short.leaves)) is None  # has six rows
    assert near.at(call) is not None
    rules = resizing.placements
    monkeypatch.setattr(resizing, "placements", lambda *args: rules(*args)[1:])
    assert near.at(call) is None
