"""The columns of MONeT's program, and of which others some of them follow; see `formulation`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from remat_solvers.core.rows import Numbering
from remat_solvers.core.wiring import Ints
from remat_solvers.published.monet.layout import Layout

__all__ = ["Columns", "Overwriting", "Terms", "Union", "count_columns"]

Terms = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Union:
    """A column that is 1 where any of the others is."""

    column: int
    of: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Overwriting:
    """A column that may be 1 where `run` is, and none of the other uses."""

    column: int
    run: int
    uses: tuple[int, ...]


@dataclass(slots=True)
class Columns:
    """Numbers of all columns, -1 where there is none.

    `choose[op]`, `run[segment, op]`, `kept[segment, value]` and `there[segment, value]`, where
    segments count from 1 and 0 is the end of the forward pass; `overwritings[segment, op]` with the
    values that are overwritten; `sums`, in order, of what is before them. `fixed` are the ops that
    are chosen anyway. `width` counts all.
    """

    layout: Layout
    choose: Ints
    fixed: NDArray[np.bool_]
    run: Ints
    kept: Ints
    there: Ints
    overwritings: dict[tuple[int, int], list[tuple[int, Overwriting]]]
    width: int
    sums: list[tuple[int, Terms]] = field(default_factory=list)

    @classmethod
    def of(cls, layout: Layout) -> Columns:
        """Give each column of a layout its number."""
        wiring, count = layout.wiring, len(layout.segments)
        fixed = np.zeros(wiring.op_count, dtype=np.bool_)
        chosen = np.zeros(wiring.op_count, dtype=np.bool_)
        for node in layout.nodes:
            if node.optional:
                chosen[list(node.ops)] = max(layout.last_keep[list(node.values)], default=0) > 0
            elif len(node.first) == 1:
                fixed[list(node.first)] = True
            else:
                chosen[list(node.first)] = True
        for segment in layout.segments:
            (chosen if len(segment.ops) > 1 else fixed)[list(segment.ops)] = True
        number = np.arange(count + 1)[:, None]
        forward = layout.place >= 0
        may_run = (number > 0) & (number <= layout.last_run)
        may_keep = forward & (number < layout.last_keep)
        sometimes = np.zeros((count + 1, wiring.value_count), dtype=np.bool_)
        for b, segment in enumerate(layout.segments, 1):
            sometimes[b, list(segment.reads - segment.always)] = True
        numbering = Numbering()
        choose, run, kept, there = (
            numbering.table(present) for present in (chosen, may_run, may_keep, sometimes)
        )
        columns = cls(layout, choose, fixed, run, kept, there, {}, numbering.width)
        columns._number_overwritings()
        return columns

    def new(self, terms: Terms) -> int:
        """Add a column that is a sum of others, for memory."""
        self.sums.append((self.width, terms))
        self.width += 1
        return self.width - 1

    def there_at(self, b: int, value: int) -> tuple[float, int]:
        """Say whether a value is stored or read in segment b: a constant, or a column."""
        segment = self.layout.segments[b - 1]
        if value in segment.always:
            return 1.0, -1
        return 0.0, int((self.there if value in segment.reads else self.kept)[b, value])

    def again(self, b: int, value: int) -> list[int]:
        """List the columns by which a value is made again in segment b."""
        return [
            int(self.run[b, op]) for op in self.layout.producers_of(value) if self.run[b, op] >= 0
        ]

    def unions(self) -> list[Union]:
        """List what each `there` is the union of."""
        layout, unions = self.layout, []
        for b, v in zip(*(axis.tolist() for axis in np.nonzero(self.there >= 0)), strict=True):
            readers = [op for op in layout.segments[b - 1].ops if v in layout.wiring.inputs[op]]
            of = [int(self.choose[op]) for op in readers]
            of += [int(self.kept[b, v])] if self.kept[b, v] >= 0 else []
            unions.append(Union(int(self.there[b, v]), tuple(of)))
        return unions

    def _number_overwritings(self) -> None:
        layout, wiring = self.layout, self.layout.wiring
        readers: dict[int, list[int]] = {}
        for op in layout.pool:
            for v in wiring.inputs[op]:
                readers.setdefault(v, []).append(op)
        for op in layout.pool:
            for v in wiring.overwritten[op]:
                if layout.place[v] >= layout.place[wiring.outputs[op][0]]:
                    continue
                later = [t for t in readers[v] if layout.order[t] > layout.order[op]]
                for b in range(1, int(layout.last_run[op]) + 1):
                    always, there = self.there_at(b, v)
                    if always:
                        continue
                    uses = [there, *(int(self.run[b, t]) for t in later)]
                    over = Overwriting(
                        self.width, int(self.run[b, op]), tuple(c for c in uses if c >= 0)
                    )
                    self.overwritings.setdefault((b, op), []).append((v, over))
                    self.width += 1


def count_columns(layout: Layout) -> int:
    """Count the columns, but for sums, without writing the program."""
    return int(
        layout.last_run.sum() + layout.last_keep.sum() + sum(len(s.reads) for s in layout.segments)
    )
