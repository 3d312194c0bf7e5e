"""Which blocks of a module do the same, found by what its forward does.

The forward runs once on fake tensors and is noted (`noting`). Blocks are the children of a
`ModuleList` or `Sequential`. Rows whose blocks differ in their settings are not run at all, and a
forward not past the first blocks if none of them is like one before it. A row of blocks repeats if
they are called one right after another and do the same up to their own parameters and buffers, each
reading what the one before it made: one block or several in turn, as where local and global
attention alternate. Then tracing two blocks at each end says what tracing all would (`unrolling`),
and those between are passed over: they return what they are given. The forward is run so once more,
and must do what it did but for these.

Nothing repeats where a block stands twice, or blocks write to what they did not make, run a custom
`autograd.Function`, whose backward nobody sees, or where later code reads what those between made.
A parameter that all blocks share is one whose gradient is summed block by block.
Known limit: a hook that a block puts on a node of autograd's graph is not seen. Linear time.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from remat_graph.torch.repeats.noting import (
    Inputs,
    Notes,
    Read,
    RepeatsUnclear,
    Run,
    forwards_replaced,
    note_forward,
)
from remat_graph.torch.tracing.aot import autocast_as_traced
from remat_graph.torch.tracing.fakes import failures_untold
from remat_graph.torch.tracing.joint import Key
from remat_graph.torch.tracing.structure import Structure, flatten

__all__ = ["FEWEST_PERIODS", "KEPT_PERIODS", "Repeat", "candidates", "find_repeats", "passed_over"]

logger = logging.getLogger(__name__)

FEWEST_PERIODS = 8  # what is saved by half of them pays for looking
_LONGEST_PERIOD = 6
KEPT_PERIODS = 2  # at each end
_ODD = 3  # blocks at the start of a row that may be unlike the others


@dataclass(frozen=True, slots=True)
class Repeat:
    """Periods of blocks that do the same; all but two at each end are passed over.

    `blocks` are the names of the modules of each period, `own` the inputs of the program that each
    reads alone: what stands at one position has one part. `passing` says for each block between how
    to return what it is given: the structure of its result, and which tensor of its arguments, in
    the order of `flatten`, stands for each tensor of it.
    """

    blocks: tuple[tuple[str, ...], ...]
    own: tuple[tuple[Key, ...], ...]
    passing: Mapping[str, tuple[Structure, tuple[int, ...]]] = field(repr=False)

    @property
    def kept(self) -> tuple[int, ...]:
        """The positions of the periods that are traced."""
        last = len(self.blocks)
        return (*range(KEPT_PERIODS), *range(last - KEPT_PERIODS, last))

    @property
    def own_between(self) -> dict[Key, Key]:
        """The inputs of the periods that are not traced, with those that stand there in one."""
        return {
            key: traced
            for keys in self.own[KEPT_PERIODS:-KEPT_PERIODS]
            for key, traced in zip(keys, self.own[1], strict=True)
        }


def candidates(module: torch.nn.Module) -> dict[str, str]:
    """Name the blocks that may repeat, each with the container that it stands in.

    They look so before anything is run: in their types, shapes, and settings such as how much a
    dropout drops. What has other settings does something else, but for whole numbers: blocks often
    know their place.
    """
    return {
        f"{name}.{key}".removeprefix("."): name
        for name, parent in module.named_modules()
        if isinstance(parent, torch.nn.ModuleList | torch.nn.Sequential)
        and len(parent) >= FEWEST_PERIODS
        and _look_alike(list(parent.children()))
        for key, _ in parent.named_children()
    }


def _look_alike(blocks: Sequence[torch.nn.Module]) -> bool:
    kinds = [_kind(block) for block in blocks]
    return _row(0, len(kinds), lambda at, other: kinds[at] == kinds[other]) is not None


def _kind(block: torch.nn.Module) -> list[Any]:
    kind: list[Any] = []
    for name, part in block.named_modules():
        settings = {k: v for k, v in part.__dict__.items() if isinstance(v, (bool, float))}
        own = (*part._parameters.items(), *part._buffers.items())
        shapes = [(key, None if tensor is None else tensor.shape) for key, tensor in own]
        kind.append((name, type(part), settings, shapes))
    return kind


def find_repeats(
    module: torch.nn.Module, rows: Mapping[str, str], run: Run, inputs: Inputs
) -> tuple[Repeat, ...]:
    """Find the rows of blocks that repeat among the `candidates`; none if that cannot be found out.

    `run` calls the forward of `module` with fake tensors, by their names in `inputs`, in place of
    its own and of its arguments, within a mode. What it raises, tracing is to raise.
    """
    try:
        with autocast_as_traced(), failures_untold():
            whole = note_forward(module, tuple(rows), run, inputs, _Hope(rows))
            comparison = _Comparison(whole, rows)
            repeats = tuple(comparison.repeats())
            if not repeats:
                return ()
            between = {key for repeat in repeats for key in repeat.own_between}
            seen = {name: entry for name, entry in inputs.items() if entry[0] not in between}
            with passed_over(module, repeats):
                short = note_forward(module, tuple(rows), run, seen)
    except Exception as error:
        logger.info("every block is traced: %s: %s", type(error).__name__, error)
        return ()
    if not comparison.is_but_for(short, repeats):
        logger.info("every block is traced: without some the others do something else")
        return ()
    return repeats


@contextmanager
def passed_over(module: torch.nn.Module, repeats: Sequence[Repeat]) -> Iterator[None]:
    """Let the blocks between return what they are given."""

    def passing(structure: Structure, sources: tuple[int, ...]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors, _ = flatten((args, kwargs))
            return structure.rebuild(iter([tensors[source] for source in sources]))

        return forward

    with forwards_replaced(
        (module.get_submodule(name), passing(*how))
        for repeat in repeats
        for name, how in repeat.passing.items()
    ):
        yield


class _Hope:
    """Ends the notes as soon as no row of blocks looks as if it repeats."""

    def __init__(self, rows: Mapping[str, str]) -> None:
        self._rows = rows
        sizes = Counter(rows.values())
        inner = {c for c in sizes for name in rows if f"{c}.".startswith(f"{name}.")}
        self._judged_at = {
            container: min(_LONGEST_PERIOD, size // FEWEST_PERIODS) + _ODD
            for container, size in sizes.items()
            if container not in inner  # whose blocks are parts of blocks
        }
        self._seen: Counter[str] = Counter()

    def __call__(self, notes: Notes) -> None:
        """Judge a row after its first blocks, once: whether the last is like one before it."""
        container, last = self._rows[notes.blocks[-1].name], len(notes.blocks) - 1
        if self._seen[container] == self._judged_at.get(container):
            comparison = _Comparison(notes, self._rows)
            lengths = range(1, self._judged_at[container] - _ODD + 1)
            if not any(comparison.are_same(last - length, last) for length in lengths):
                del self._judged_at[container]
        self._seen[container] += 1
        if not self._judged_at:
            raise RepeatsUnclear("no blocks do the same")


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Which blocks did the same in a forward, and which rows of them repeat."""

    notes: Notes
    rows: Mapping[str, str]

    def repeats(self) -> Iterator[Repeat]:
        """Find the rows of blocks that repeat."""
        blocks = self.notes.blocks
        counts = Counter(block.name for block in blocks)
        start = 0
        for index in range(1, len(blocks) + 1):
            if index < len(blocks):
                last, block = blocks[index - 1], blocks[index]
                if (
                    last.end == block.first
                    and self.rows[last.name] == self.rows[block.name]
                    and counts[last.name] == counts[block.name] == 1
                ):
                    continue
            row = _row(start, index, self.are_same)
            repeat = None if row is None else self._repeat(*row)
            if repeat is not None:
                yield repeat
            start = index

    def are_same(self, index: int, other: int) -> bool:
        """Whether two blocks do the same to what stands at the same place, and to their own."""
        notes, a, b = self.notes, self.notes.blocks[index], self.notes.blocks[other]
        if notes.operators[a.first : a.end] != notes.operators[b.first : b.end]:
            return False
        return all(
            read == counterpart or self._stand_for(index, read, other, counterpart)
            for call, twin in zip(a.calls, b.calls, strict=True)
            for read, counterpart in zip(notes.reads[call], notes.reads[twin], strict=True)
        )

    def _stand_for(self, index: int, read: Read, other: int, counterpart: Read) -> bool:
        """Whether what one block reads is to it what something else is to the other."""
        if read[0] != counterpart[0]:
            return False
        if read[0] == "made":
            return read == self._shifted(counterpart, index - other)
        a, b = self.notes.blocks[index], self.notes.blocks[other]
        own = _own_part(read, a.name)
        return own is not None and own == _own_part(counterpart, b.name)

    def _shifted(self, read: Read, by: int) -> Read | None:
        """Find what stands at the same place so many blocks on; `None` for what none made."""
        blocks = self.notes.blocks
        at = bisect_right(blocks, read[1], key=lambda block: block.end)
        if at == len(blocks) or read[1] < blocks[at].first or not 0 <= at + by < len(blocks):
            return None
        there = blocks[at + by].first + read[1] - blocks[at].first
        return ("made", there, read[2]) if there in blocks[at + by].calls else None

    def _repeat(self, start: int, length: int, count: int) -> Repeat | None:
        blocks, notes = self.notes.blocks, self.notes
        periods = [range(start + p * length, start + (p + 1) * length) for p in range(count)]
        row = range(blocks[start].first, blocks[periods[-1][-1]].end)
        own = [self._own_of(period) for period in periods]
        taken = [key for keys in own for key in keys]
        outside = {
            read[1]
            for reads in (*notes.reads[: row.start], *notes.reads[row.stop :])
            for read in reads
            if read[0] == "given"
        }
        if (
            len({len(keys) for keys in own}) > 1
            or len(set(taken)) < len(taken)
            or outside.intersection(taken)
        ):
            return None
        between = range(periods[KEPT_PERIODS][0], periods[-KEPT_PERIODS][0])
        passing = {}
        for index in between:
            sources, structure = self._sources(index), blocks[index].structure
            if sources is None or structure is None:
                return None
            passing[blocks[index].name] = structure, sources
        hidden = range(blocks[between[0]].first, blocks[between[-1]].end)
        readers = itertools.chain(
            notes.returned,
            *notes.reads[: hidden.start],
            *notes.reads[blocks[periods[-KEPT_PERIODS][-1]].end :],
        )
        if any(read[0] == "made" and read[1] in hidden for read in readers):
            return None
        names = [tuple(blocks[index].name for index in period) for period in periods]
        return Repeat(tuple(names), tuple(own), passing)

    def _own_of(self, period: range) -> tuple[Key, ...]:
        names = [self.notes.blocks[index].name for index in period]
        keys: dict[Key, None] = {}
        for index in period:
            for call in self.notes.blocks[index].calls:
                for read in self.notes.reads[call]:
                    if any(_own_part(read, name) is not None for name in names):
                        keys[read[1]] = None
        return tuple(keys)

    def _sources(self, index: int) -> tuple[int, ...] | None:
        """Find for each tensor that a block returns the argument that stands at its place."""
        block, before = self.notes.blocks[index], self.notes.blocks[index - 1]
        if len(block.returned) != len(before.returned):
            return None
        sources = []
        for read, earlier in zip(block.returned, before.returned, strict=True):
            if read in block.taken:
                sources.append(block.taken.index(read))
            elif earlier in block.taken:
                sources.append(block.taken.index(earlier))
            else:
                return None
        return tuple(sources)

    def is_but_for(self, short: Notes, repeats: Sequence[Repeat]) -> bool:
        """Whether another forward did the same as this one but for the blocks passed over."""
        left_out = {name for repeat in repeats for name in repeat.passing}
        place: dict[int, int] = {}
        blocks, operators = self.notes.blocks, self.notes.operators
        left = [index for index, block in enumerate(blocks) if block.name in left_out]
        hidden = {call for index in left for call in blocks[index].calls}
        for call in range(len(operators)):
            if call not in hidden:
                place[call] = len(place)
        for index in left:  # what they made is what the last one of their kind made
            repeat = next(r for r in repeats if blocks[index].name in r.passing)
            like = blocks[index - len(repeat.blocks[0])]
            for call, twin in zip(blocks[index].calls, like.calls, strict=True):
                place[call] = place[twin]

        def moved(reads: Sequence[Read]) -> tuple[Read, ...]:
            return tuple(
                ("made", place[read[1]], read[2]) if read[0] == "made" else read for read in reads
            )

        visible = [call for call in range(len(operators)) if call not in hidden]
        return (
            [operators[call] for call in visible] == short.operators
            and [moved(self.notes.reads[call]) for call in visible] == short.reads
            and moved(self.notes.returned) == short.returned
        )


def _row(start: int, end: int, are_same: Callable[[int, int], bool]) -> tuple[int, int, int] | None:
    """Find the longest row of periods: its first block, the length of a period, how many."""
    for length in range(1, min(_LONGEST_PERIOD, (end - start) // FEWEST_PERIODS) + 1):
        same = [are_same(index, index + length) for index in range(start, end - length)]
        first, longest = max(_stretches(same), key=lambda stretch: stretch[1], default=(0, 0))
        count = longest // length  # the backward of the last begins otherwise
        if count >= FEWEST_PERIODS:
            return start + first, length, count
    return None


def _stretches(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield start and length of each stretch of true ones."""
    start = 0
    for value, group in itertools.groupby(flags):
        length = len(list(group))
        if value:
            yield start, length
        start += length


def _own_part(read: Read, name: str) -> tuple[str, str] | None:
    """Say which part of a block a given tensor is; `None` if it is of another module."""
    if read[0] != "given" or not isinstance(read[1][1], str):
        return None
    kind, key = read[1]
    return (kind, key.removeprefix(f"{name}.")) if key.startswith(f"{name}.") else None
