"""The columns of H-ILP's program for a level: which there are, and their numbers.

A node may run again, and a value be kept, only up to the last phase that can need it, directly or
to make something again; columns beyond that are not there. What is numbered: see `formulation`.
Linear in the columns.
"""

from __future__ import annotations

import numpy as np

from remat_solvers.core.rows import Numbering
from remat_solvers.core.wiring import Ints
from remat_solvers.published.hierarchical.blocks.level import Choice, Level

__all__ = ["Columns", "reads"]


class Columns(Numbering):
    """Numbers of the columns by phase, -1 where there is none.

    `run[k]` has a row for each choice of node k, `saved[j]` one for each option of layer j;
    `kept[d]` and `creation[d]` are of value d, `free[d][k]` of freeing it after node k. `width`
    counts all. `halves[j, backward]` is a node of layer j.
    """

    def __init__(self, level: Level, *, corrected: bool) -> None:
        super().__init__()
        self.level = level
        self.corrected = corrected
        self.size = level.wiring.size
        self.phases = len(level.nodes) + 1
        self.phase = np.arange(self.phases)
        self.producer: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        self.halves: dict[tuple[int, bool], int] = {}
        for k, node in enumerate(level.nodes):
            if node.layer is not None:
                self.halves[node.layer, node.backward] = k
            for choice in node.choices:
                self.producer.update(dict.fromkeys(choice.first.makes, k))
                for d in reads(choice):
                    if k not in self.readers.setdefault(d, []):
                        self.readers[d].append(k)
        for d in level.wiring.results.tolist():
            self.readers.setdefault(d, []).append(self.phases - 1)
        self.last_run, self.last_keep = self._horizons()
        self.run = [
            np.array(
                [
                    self._span(k, k if choice.later is None else self.last_run[k])
                    for choice in node.choices
                ]
            )
            for k, node in enumerate(level.nodes)
        ]
        self.kept = {
            d: self._span(self.producer[d] + 1, last) for d, last in self.last_keep.items()
        }
        self.saved = [self._phantoms(j) for j in range(len(level.layers))]
        self.creation = {d: self._creations(d) for d in self.producer if self._needs_creation(d)}
        self.free = {d: self._frees(d) for d in self.producer}

    def phantom_bytes(self, layer: int, option: int) -> int:
        """Count what an option keeps between the halves."""
        saved = self.level.nodes[self.halves[layer, False]].choices[option].saved
        return int(self.size[sorted(saved)].sum())

    def _span(self, first: int, last: int) -> Ints:
        return self.table((self.phase >= first) & (self.phase <= last))

    def _horizons(self) -> tuple[list[int], dict[int, int]]:
        """Say up to which phase running a node and keeping a value can be of use."""
        nodes = self.level.nodes
        last_run = [*range(len(nodes)), len(nodes)]
        last_keep: dict[int, int] = {}
        for k in reversed(range(len(nodes))):
            node = nodes[k]
            again = [c.later for c in node.choices if c.later is not None]
            for d in {d for choice in node.choices for d in choice.first.makes}:
                last_keep[d] = max((last_run[r] for r in self.readers.get(d, [])), default=k)
            ends = [last_keep[d] for run in again for d in run.makes]
            if again and node.layer is not None and not node.backward:
                back = self.halves.get((node.layer, True))
                ends += [] if back is None else [last_run[back]]
            last_run[k] = max([k, *ends])
        return last_run, last_keep

    def _phantoms(self, layer: int) -> Ints:
        """Give columns to the phantoms of a layer, a row of phases for each option."""
        forward, back = self.halves[layer, False], self.halves.get((layer, True))
        last = -1 if back is None else self.last_run[back]
        count = len(self.level.layers[layer].options)
        rows = [self._span(forward + 1, last) for _ in range(count)]
        return np.array(rows, dtype=np.int64).reshape(count, self.phases)

    def _needs_creation(self, d: int) -> bool:
        node = self.level.nodes[self.producer[d]]
        return node.layer is not None or len(node.choices[0].first.makes) > 1

    def _creations(self, d: int) -> Ints:
        k = self.producer[d]
        again = any(c.later is not None and d in c.later.makes for c in self.level.nodes[k].choices)
        return self._span(k, self.last_run[k] if again else k)

    def _frees(self, d: int) -> dict[int, Ints]:
        """Give columns to freeing a value after its readers.

        After its producer too if several values come of that; in the phase of a node itself only
        where corrections ask for it.
        """
        if self.size[d] == 0:
            return {}
        k = self.producer[d]
        after = [r for r in self.readers.get(d, []) if r < self.phases - 1]
        if self._needs_creation(d):
            after.append(k)
        columns: dict[int, Ints] = {}
        for r in sorted(set(after)):
            runs = (self.run[r] >= 0).any(axis=0)
            own = self.corrected and self.level.nodes[r].layer is not None and r != k
            runs &= (self.phase > r) | ((self.phase == r) & own)
            columns[r] = self.table(runs)
        return columns


def reads(choice: Choice) -> frozenset[int]:
    """List what a choice reads, the first time or later."""
    return choice.first.reads | (frozenset() if choice.later is None else choice.later.reads)
