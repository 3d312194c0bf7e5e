"""Layers stay whole, and alike, however many there are."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import Block
from remat_partition import partition
from remat_partition.runs import Run, find_runs


@given(
    prefix=st.lists(st.integers(100, 103), max_size=5),
    unit=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    times=st.integers(2, 9),
    suffix=st.lists(st.integers(200, 203), max_size=5),
)
def test_a_planted_run_is_found(prefix, unit, times, suffix):
    tokens = [*dict.fromkeys(prefix), *unit * times, *dict.fromkeys(suffix)]
    planted = range(len(set(prefix)), len(set(prefix)) + len(unit) * times)
    runs = find_runs(tokens)
    whole = [run for run in runs if (run.start, run.length) == (planted.start, len(planted))]
    assert len(whole) == 1
    assert len(unit) % whole[0].period == 0


@given(tokens=st.lists(st.integers(0, 3), max_size=40))
def test_runs_repeat_and_do_not_overlap(tokens):
    runs = find_runs(tokens)
    for run in runs:
        stretch = tokens[run.start : run.start + run.length]
        assert len(stretch) == run.length >= 2 * run.period
        assert stretch[run.period :] == stretch[: -run.period]
    assert all(a.start + a.length <= b.start for a, b in pairwise(runs))
    if not runs:
        squares = (
            tokens[i : i + p] == tokens[i + p : i + 2 * p]
            for p in range(1, len(tokens) // 2 + 1)
            for i in range(len(tokens) - 2 * p + 1)
        )
        assert not any(squares)


def test_a_run_keeps_the_shorter_period():
    assert find_runs([1, 2] * 6) == [Run(0, 12, 2)]
    assert find_runs([]) == find_runs([1]) == find_runs([1, 2, 3]) == []


def layered(layers, size, wide=50):
    """Layers of `size` ops in a chain, each with a skip from its start to its end."""
    before, classes, sizes = [()], ["start"], [1]
    for _ in range(layers):
        last = len(before) - 1
        for j in range(size):
            before.append((last + j,) if j < size - 1 else tuple(sorted({last, last + j})))
            classes.append(f"kind{j}")
            sizes.append(1 if j == size - 1 else wide)
    before.append((len(before) - 1,))
    return {"before": before, "classes": [*classes, "end"], "sizes": [*sizes, 1]}


@pytest.mark.parametrize("layers", [5, 24, 96, 97])
@pytest.mark.parametrize("size", [4, 8, 23])
def test_layers_stay_whole(plain, layers, size):
    """No block cuts through a layer; layers of more than a block's ops are blocks themselves."""
    graph = plain(**layered(layers, size))
    root = partition(graph, partitioner="repeats", max_block_ops=8).root
    whole = [set(range(i, i + size)) for i in range(1, layers * size, size)]
    blocks = [{int(op[2:]) for op in b.op_names()} for b in root.blocks()]
    for block in blocks:
        cut = [layer for layer in whole if block & layer and not layer <= block]
        assert not cut or block < cut[0]
    in_blocks = [any(layer <= block for block in blocks[1:]) for layer in whole]
    assert all(in_blocks)
    if size > 4:
        assert all(layer in blocks for layer in whole)


@pytest.mark.parametrize("size", [4, 8, 23])
def test_unique_blocks_do_not_grow_with_depth(plain, size):
    counts = [
        len(partition(plain(**layered(layers, size)), partitioner="repeats").unique_blocks)
        for layers in (24, 96, 192)
    ]
    assert counts[1] <= counts[0] + 1
    assert counts[2] <= counts[0] + 2
    assert max(counts) <= 10


def test_nested_repeats_are_found_inside(plain):
    """Stages of eight layers of three ops; the layers of a stage are alike."""
    before, classes = [()], ["start"]
    for _ in range(6):
        for kind in ["down", *["norm", "conv", "add"] * 8]:
            before.append((len(before) - 1,))
            classes.append(kind)
    graph = plain(before, classes=classes)
    found = partition(graph, partitioner="repeats", max_top_ops=8, max_block_ops=9)
    stages = [m for m in found.root.members if isinstance(m, Block)]
    assert len({len(list(stage.op_names())) for stage in stages[:-1]}) == 1
    assert len(found.unique_blocks) <= 6


def test_without_repeats_it_is_h_partition(plain):
    before = [(i - 1,) if i else () for i in range(60)]
    graph = plain(before, classes=[str(i * i) for i in range(60)])
    root = partition(graph, partitioner="repeats").root
    assert root == partition(graph, partitioner="h-partition").root
    assert len(root.members) <= 20


def test_what_lies_between_repeats_is_cut_into_blocks_too(plain):
    """Chains of 60 ops around layers, with pairs alike: no op is left beside blocks."""
    graph = layered(24, 4)
    odd = [str(i * i) for i in range(40) for _ in range(1 + i % 2)]
    before = [(i - 1,) if i else () for i in range(60)]
    start = len(before) - 1
    before += [tuple(source + start for source in sources) for sources in graph["before"][1:]]
    before += [(len(before) - 1 + i,) for i in range(60)]
    classes = [*odd, *graph["classes"][1:], *(f"end {kind}" for kind in odd)]
    root = partition(plain(before, classes=classes), partitioner="repeats").root
    lowest = [b for b in root.blocks() if not any(isinstance(m, Block) for m in b.members)]
    assert sum(len(block.members) for block in lowest) == len(before)
    assert len(lowest) <= 24
    layers = [{f"op{i}" for i in range(start + 1 + 4 * j, start + 5 + 4 * j)} for j in range(24)]
    blocks = [set(block.op_names()) for block in lowest]
    assert all(any(layer <= block for block in blocks) for layer in layers)
