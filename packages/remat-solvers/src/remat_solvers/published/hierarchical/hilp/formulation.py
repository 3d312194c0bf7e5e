r"""H-ILP: the integer program for one level of a hierarchy, in sparse blocks.

HiRemate (Gusak et al. 2024), appendix B. With t a phase, k a node, o one of its choices, d a value,
j a layer (the two halves of a smaller block), columns exist where they can be of use:

- `run[t, k, o]` (R): node k runs with choice o in phase t, whose goal is the first run of node t;
- `kept[t, d]` (P): d is there when phase t begins. Every value has one producer here, sums of
  gradients are ops of their own, so the contributions S of the paper are P;
- `saved[t, j, o]` (Sp): the phantom of layer j is there with option o;
- `creation[t, d]` (C): d comes into being in phase t; where the producer is a plain op of one
  output, that is `run` of it;
- `free[t, d, k]` (D): d goes after node k in phase t;
- `used[t, k]` (U): bytes held in phase t before node k.

Rows:

- (5) one choice per node and phase, exactly one for node t in phase t; (6) one phantom per layer;
- (7 to 9) `saved[t+1, j, o] <= saved[t, j, o] + run[t, F_j, o] - run[t, B_j, o]`: a phantom comes
  with the forward half, the backward half needs it and ends it. It may also be dropped at the end
  of any phase, and made again in any: there is no restriction to the phases of its own halves;
- `run[t, k, o] <= kept[t, d] + creation[t, d]` for what choice o reads: dependencies are specific
  to options; `creation[t, d] <= sum of run[t, k, o] <= kept[t, d] + creation[t, d]` over the
  choices o of its producer that make it;
- `sum over k of free[t, d, k] + kept[t+1, d] <= kept[t, d] + creation[t, d]`, `free[t, d, k] <= sum
  of run[t, k, o]`, and no read after a free: the deletion rules of the paper, linearised as in
  Checkmate and tightened (see `checkmate.formulation`);
- memory, for each choice and each peak i of a run, which holds m_i bytes more than was there
  before when the values `freed_i` have been read for the last time and `outputs_i` have been made:
  `used + m_i run[t, k, o] - sum over freed_i of size free[t, d, k]
  - sum over outputs_i of size (sum_o run[t, k, o] - creation[t, d]) <= budget`.
  Without corrections, only the largest m_i counts and nothing is freed inside a run.

The columns are numbered in `columns`. All rows hold for every schedule in the phases; a point gives
a schedule whose memory is at most what the rows say, as values are freed right after their last
use.
Size: O(nodes x (options + reads)) columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat_solvers.core.milp import Program
from remat_solvers.core.rows import Rows
from remat_solvers.core.wiring import Floats, Ints
from remat_solvers.published.hierarchical.blocks.compose import Pick
from remat_solvers.published.hierarchical.blocks.level import Level
from remat_solvers.published.hierarchical.blocks.runs import Run, RunPeak
from remat_solvers.published.hierarchical.hilp.columns import Columns, reads

__all__ = ["Formulation", "formulate"]


@dataclass(frozen=True, slots=True, eq=False)
class Formulation:
    """The program, with right side `program.right + budget_bytes * per_byte`.

    `run[k][o]` are columns by phase, -1 where there is none; likewise `kept[d]`, `creation[d]` by
    value of the level, `free[d][k]` by value and node, `saved[j][o]` by layer and option.
    """

    level: Level
    program: Program
    per_byte: Floats
    run: tuple[Ints, ...]
    kept: dict[int, Ints]
    creation: dict[int, Ints]
    free: dict[int, dict[int, Ints]]
    saved: tuple[Ints, ...]

    def read(self, point: Floats) -> list[Pick]:
        """List the runs of a point, in order."""
        full = np.append(point, 0.0) > 0.5
        picks: list[Pick] = []
        for k, columns in enumerate(self.run):
            choice, phase = np.nonzero(full[columns])
            picks += [(t, k, o) for t, o in zip(phase.tolist(), choice.tolist(), strict=True)]
        return sorted(picks)

    def embed(self, picks: list[Pick]) -> Floats | None:
        """Write runs, in order, as the whole part of a point; `None` if they are in no phases.

        A value is kept from where it is made to its last use before it is made again. The bytes
        used are left for the back end to complete.
        """
        point = np.zeros(len(self.program.cost))
        phases = len(self.level.nodes) + 1
        used_until: dict[int, int] = dict.fromkeys(self.level.wiring.results.tolist(), phases - 1)
        phantom_until: dict[int, tuple[int, int]] = {}
        for t, k, o in reversed(picks):
            node = self.level.nodes[k]
            choice = node.choices[o]
            if not _mark(point, self.run[k][o], t, t):
                return None
            run = choice.first if t == k else choice.later
            if run is None:
                return None
            if node.layer is not None and node.backward:
                if node.layer in phantom_until:
                    return None
                phantom_until[node.layer] = (t, o)
            elif node.layer is not None and choice.option is not None:
                last, option = phantom_until.pop(node.layer, (t, o))
                if option != o or not _mark(point, self.saved[node.layer][o], t + 1, last):
                    return None
            for d in run.makes:
                if d in self.creation:
                    _mark(point, self.creation[d], t, t)
                until = used_until.pop(d, t)
                if until > t and not _mark(point, self.kept[d], t + 1, until):
                    return None
            for d in run.reads:
                used_until.setdefault(d, t)
        self._mark_freed(point, picks)
        return point

    def _mark_freed(self, point: Floats, picks: list[Pick]) -> None:
        """Free a value after the last node of a phase that touches it, unless it is kept then."""
        last_touch: dict[tuple[int, int], int] = {}
        for t, k, o in picks:
            choice = self.level.nodes[k].choices[o]
            run = choice.first if t == k else choice.later
            if run is not None:
                last_touch.update(dict.fromkeys([(t, d) for d in run.reads | run.makes], k))
        results = set(self.level.wiring.results.tolist())
        for (t, d), k in last_touch.items():
            column = self.free.get(d, {}).get(k)
            if t == len(self.level.nodes):
                stays = d in results
            else:
                kept = self.kept.get(d)
                stays = kept is not None and kept[t + 1] >= 0 and point[kept[t + 1]] > 0
            if column is not None and not stays:
                _mark(point, column, t, t)


def _mark(point: Floats, columns: Ints, first: int, last: int) -> bool:
    """Set the columns of some phases; false if one is not there."""
    chosen = columns[first : last + 1]
    if (chosen < 0).any():
        return False
    point[chosen] = 1
    return True


class _Writer:
    """Writes the rows of one program over its columns."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.level = columns.level
        self.phases = columns.phases
        self.size = columns.size
        self.rows = Rows()

    def write(self) -> Formulation:
        """Write everything."""
        columns = self.columns
        self._choices()
        for d in columns.producer:
            self._life(d)
        used_start = columns.width
        per_byte = self._memory()
        lower, upper = np.zeros(columns.width), np.ones(columns.width)
        upper[used_start:] = np.inf
        for k, run in enumerate(columns.run):
            if len(run) == 1:
                lower[run[0, k]] = 1
        program = Program(
            cost=self._cost(),
            matrix=self.rows.matrix(columns.width),
            right=self.rows.bounds(),
            lower=lower,
            upper=upper,
            integral=np.arange(columns.width) < used_start,
        )
        return Formulation(
            level=self.level,
            program=program,
            per_byte=per_byte,
            run=tuple(columns.run),
            kept=columns.kept,
            creation=columns.creation,
            free=columns.free,
            saved=tuple(columns.saved),
        )

    def _choices(self) -> None:
        """Add (5) to (9)."""
        for k, columns in enumerate(self.columns.run):
            if len(columns) > 1:
                there = np.flatnonzero((columns >= 0).any(axis=0))
                self.rows.add(1.0, len(there), *((row[there], 1.0) for row in columns))
                self.rows.add(-1.0, 1, *((row[k : k + 1], -1.0) for row in columns))
        for layer, saved in enumerate(self.columns.saved):
            forward, back = (
                self.columns.halves[layer, False],
                self.columns.halves.get((layer, True)),
            )
            if back is None:
                continue
            there = np.arange(forward, self.columns.last_run[back] + 1)
            none = np.full(self.phases + 1, -1, dtype=np.int64)
            terms = []
            for option, row in enumerate(saved):
                after = none.copy()
                after[: self.phases] = row
                ahead, behind = self.columns.run[forward][option], self.columns.run[back][option]
                self.rows.add(
                    0.0,
                    len(there),
                    (after[there + 1], 1.0),
                    (row[there], -1.0),
                    (ahead[there], -1.0),
                    (behind[there], 1.0),
                )
                terms += [(row[there], 1.0), (ahead[there], 1.0)]
            self.rows.add(1.0, len(there), *terms)

    def _life(self, d: int) -> None:
        """Add the rows of one value: made, read, kept, freed."""
        k = self.columns.producer[d]
        node = self.level.nodes[k]
        nothing = np.full(self.phases, -1, dtype=np.int64)
        kept = self.columns.kept.get(d, nothing)
        if d in self.columns.creation:
            creation = self.columns.creation[d]
            there = np.flatnonzero(creation >= 0)
            terms = [(creation[there], 1.0)]
            for choice, row in zip(node.choices, self.columns.run[k], strict=True):
                makes = there == k
                if choice.later is not None and d in choice.later.makes:
                    makes = there >= k
                terms.append((np.where(makes, row[there], -1), -1.0))
            self.rows.add(0.0, len(there), *terms)
            alive = [(columns, -entry) for columns, entry in terms]
            self.rows.add(0.0, len(there), *alive, (kept[there], -1.0))
        else:
            creation = self.columns.run[k][0]
        frees = self.columns.free[d]
        for r in self.columns.readers.get(d, []):
            if r == self.phases - 1:
                at_end = [(kept[r:], -1.0), (creation[r:], -1.0)]
                self.rows.add(-1.0, 1, *at_end, *((columns[r:], 1.0) for columns in frees.values()))
                continue
            reading = [
                (choice, row)
                for choice, row in zip(
                    self.level.nodes[r].choices, self.columns.run[r], strict=True
                )
                if d in reads(choice)
            ]
            there = np.flatnonzero((self.columns.run[r] >= 0).any(axis=0))
            terms = []
            for choice, row in reading:
                chosen = np.where(
                    there == r,
                    d in choice.first.reads,
                    choice.later is not None and d in choice.later.reads,
                )
                terms.append((np.where(chosen, row[there], -1), 1.0))
            self.rows.add(0.0, len(there), *terms, (kept[there], -1.0), (creation[there], -1.0))
            earlier = [columns[there] for at, columns in frees.items() if at < r]
            if earlier:
                self.rows.add(1.0, len(there), *terms, *((columns, 1.0) for columns in earlier))
        for at, columns in frees.items():
            there = np.flatnonzero(columns >= 0)
            ran = ((row[there], -1.0) for row in self.columns.run[at])
            self.rows.add(0.0, len(there), (columns[there], 1.0), *ran)
        later = np.append(kept[1:], -1)
        freed = np.zeros(self.phases, dtype=np.bool_)
        for columns in frees.values():
            freed |= columns >= 0
        there = np.flatnonzero((later >= 0) | freed)
        self.rows.add(
            0.0,
            len(there),
            (later[there], 1.0),
            (kept[there], -1.0),
            (creation[there], -1.0),
            *((columns[there], 1.0) for columns in frees.values()),
        )

    def _memory(self) -> Floats:
        """Add the bytes used before each node of a phase, and the budget."""
        unit = max(float(sum(self.size.tolist())) / 1000, 1e-3)
        size = self.size / unit
        may = np.array([(columns >= 0).any(axis=0) for columns in self.columns.run])
        used = [self.columns.table(row) for row in may]
        numbers: list[int] = []
        before = np.full(self.phases, -1, dtype=np.int64)
        # What a node changes is added to the row of the node after it in the same phase.
        open_terms = [
            (kept, np.full(self.phases, size[d])) for d, kept in self.columns.kept.items()
        ]
        for layer, saved in enumerate(self.columns.saved):
            for option, phantoms in enumerate(saved):
                weight = self.columns.phantom_bytes(layer, option) / unit
                open_terms.append((phantoms, np.full(self.phases, weight)))
        for k in range(len(self.level.nodes)):
            there = np.flatnonzero(may[k])
            terms = [(columns[there], weights[there]) for columns, weights in open_terms]
            self.rows.add(0.0, len(there), (used[k][there], -1.0), (before[there], 1.0), *terms)
            # Phases in which this node cannot run keep their open terms.
            rest = ~may[k]
            open_terms = [
                (np.where(rest, columns, -1), weights)
                for columns, weights in open_terms
                if (columns[rest] >= 0).any()
            ]
            before = np.where(may[k], used[k], before)
            numbers += self._within(k, used[k], there, unit)
            open_terms += self._changes(k, unit)
        per_byte = np.zeros(self.rows.count)
        per_byte[numbers] = 1 / unit
        return per_byte

    def _changes(self, k: int, unit: float) -> list[tuple[Ints, Floats]]:
        """List what a run of a node adds to the bytes used, by phase."""
        node = self.level.nodes[k]
        one = np.ones(self.phases)
        changes: list[tuple[Ints, Floats]] = []
        for d in sorted({d for choice in node.choices for d in choice.first.makes}):
            creation = self.columns.creation.get(d, self.columns.run[k][0])
            changes.append((creation, one * (self.size[d] / unit)))
        if node.layer is not None:
            sign = -1 if node.backward else 1
            for choice, row in zip(node.choices, self.columns.run[k], strict=True):
                if choice.option is not None:
                    weight = self.columns.phantom_bytes(node.layer, choice.option) / unit
                    changes.append((row, one * (sign * weight)))
        for d, frees in self.columns.free.items():
            if k in frees:
                changes.append((frees[k], one * (-self.size[d] / unit)))
        return changes

    def _within(self, k: int, used: Ints, there: Ints, unit: float) -> list[int]:
        """Add the budget for the runs of a node; returns the numbers of the rows."""
        node = self.level.nodes[k]
        numbers: list[int] = []
        for first in (True, False):
            phases = there[(there == k) == first]
            runs = [choice.first if first else choice.later for choice in node.choices]
            rows = [(run, row) for run, row in zip(runs, self.columns.run[k], strict=True) if run]
            if not len(phases) or not rows:
                continue
            floors = [(row[phases], self._floor(k, run) / unit) for run, row in rows]
            numbers += self.rows.add(0.0, len(phases), (used[phases], 1.0), *floors).tolist()
            for run, row in rows:
                for peak in run.peaks if self._is_corrected(run) else ():
                    freed, outputs = self._corrections(k, peak)
                    if not freed and not outputs:
                        continue
                    terms = [(used[phases], 1.0), (row[phases], peak.extra_bytes / unit)]
                    for d in freed:
                        terms.append((self.columns.free[d][k][phases], -self.size[d] / unit))
                    for d in outputs:
                        weight = self.size[d] / unit
                        terms.append((self.columns.creation[d][phases], weight))
                        terms += [(other[phases], -weight) for _, other in rows]
                    numbers += self.rows.add(0.0, len(phases), *terms).tolist()
        return numbers

    def _is_corrected(self, run: Run) -> bool:
        return self.columns.corrected or len(run.peaks) == 1

    def _corrections(self, k: int, peak: RunPeak) -> tuple[list[int], list[int]]:
        """List the values that may be freed before a peak, and those that may have been there."""
        freed = sorted(d for d in peak.freed if k in self.columns.free.get(d, {}))
        return freed, sorted(peak.outputs & self.columns.creation.keys())

    def _floor(self, k: int, run: Run) -> float:
        """Bytes that a run adds whatever is freed early; without corrections, the most."""
        if not self._is_corrected(run):
            return run.peak_bytes
        least = 0
        for peak in run.peaks:
            freed, outputs = self._corrections(k, peak)
            less = int(self.size[[*freed, *outputs]].sum())
            least = max(least, peak.extra_bytes - less)
        return least

    def _cost(self) -> Floats:
        """Cost of the runs, in thousandths of the time of running every op once."""
        scale = 1000 / max(float(self.level.wiring.time.sum()), 1e-300)
        cost = np.zeros(self.columns.width)
        for k, (node, columns) in enumerate(zip(self.level.nodes, self.columns.run, strict=True)):
            for choice, row in zip(node.choices, columns, strict=True):
                later = row[k + 1 :]
                if choice.later is not None:
                    cost[later[later >= 0]] = choice.later.time * scale
                cost[row[k]] = choice.first.time * scale
        return cost


def formulate(level: Level, *, corrected: bool) -> Formulation:
    """Write the program of a level; the budget comes in when it is solved."""
    return _Writer(Columns(level, corrected=corrected)).write()
