"""Rows of a sparse program, collected block by block as triples; no loop over single rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy import sparse

from remat_solvers.core.wiring import Floats, Ints

__all__ = ["Rows"]


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
