"""The columns and rows of a sparse program, by blocks; no loop over single ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from remat_solvers.core.wiring import Floats, Ints

__all__ = ["Numbering", "Rows"]


class Numbering:
    """Gives the columns of a program their numbers, in tables with -1 where there is none."""

    def __init__(self) -> None:
        self.width = 0

    def table(self, there: NDArray[np.bool_]) -> Ints:
        """Give each place that is there a column."""
        columns = np.full(there.shape, -1, dtype=np.int64)
        self.number(columns, there)
        return columns

    def number(self, columns: Ints, items: Ints | NDArray[np.bool_]) -> None:
        """Give the items of a table the next numbers, in their order."""
        count = columns[items].size
        columns[items] = np.arange(self.width, self.width + count)
        self.width += count


@dataclass(slots=True)
class Rows:
    """Rows of `matrix @ x <= right`; columns of -1 stand for a variable that is not there."""

    row: list[Ints] = field(default_factory=list)
    column: list[Ints] = field(default_factory=list)
    entry: list[Floats] = field(default_factory=list)
    right: list[Floats] = field(default_factory=list)
    count: int = 0

    def add(self, right: float | Floats, size: int, *terms: tuple[Ints, float | Floats]) -> Ints:
        """Add `size` rows; each term gives a column per row. Returns the numbers of the rows."""
        rows = np.arange(self.count, self.count + size)
        self.right.append(np.broadcast_to(np.float64(right), (size,)))
        self.count += size
        for columns, entry in terms:
            self.extend(rows, columns, entry)
        return rows

    def add_sum(self, right: float, columns: Ints, entries: Floats) -> None:
        """Add one row over many columns."""
        self.extend(np.broadcast_to(self.add(right, 1), columns.shape), columns, entries)

    def extend(self, rows: Ints, columns: Ints, entry: float | Floats) -> None:
        """Add entries to rows that are there; several in one place add up."""
        there = columns >= 0
        self.row.append(rows[there])
        self.column.append(columns[there])
        self.entry.append(np.broadcast_to(entry, columns.shape)[there].astype(np.float64))

    def matrix(self, width: int) -> sparse.csr_array:
        """Assemble."""
        if not self.row:
            return sparse.csr_array((self.count, width))
        triples = (
            np.concatenate(self.entry),
            (np.concatenate(self.row), np.concatenate(self.column)),
        )
        return sparse.csr_array(sparse.coo_array(triples, shape=(self.count, width)))

    def bounds(self) -> Floats:
        """Right sides of all rows."""
        return np.concatenate(self.right) if self.right else np.zeros(0)
