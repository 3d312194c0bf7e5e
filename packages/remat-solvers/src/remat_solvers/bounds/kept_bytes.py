"""What a region keeps between its halves against its time, with no limit on its peaks: exactly.

With room for everything while a half runs, each op runs once in the forward half, and at most once
again after the boundary. So a plan says which values are kept (`keep[v]`) and which forward ops run
again (`again[i]`), and

    keep[v] + again[op of v] >= 1         for each v that the backward half reads or returns,
    keep[u] + again[op of u] >= again[i]  for each op i that may run again and each u it reads,
    keep[v] = 1                              for each v that the op at the boundary reads,

with `again[i] = 0` where an op must not run again. The least of `size @ keep` is a minimum cut; the
least of `time @ again` with `size @ keep <= K` is the time of recomputation at K. Both hold for
every schedule in the order of the graph, whatever its peaks: what it has alive at the boundary and
what it runs after it are a point of the program, of no more time. In any order they hold if only
ops count as of the forward half that the op at the boundary needs, and as of the backward half that
need it (`any_order`).
Complexity: one variable per forward op and value; for some hundred ops a few milliseconds.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from remat_graph import Graph
from remat_solvers.core.milp import HIGHS, Answer, Outcome, Program, solve_program
from remat_solvers.core.trust import distrust, doubt_of
from remat_solvers.core.wiring import Floats, Ints, Wiring

__all__ = ["BoundedSequence", "KeptBytesProgram"]

_SCALE = 1e4  # what the largest sums of the program are brought to
_TOLERANCE = 1e-7  # of a bound, for tolerances


@dataclass(frozen=True, slots=True, eq=False)
class BoundedSequence:
    """A sequence that keeps at most what was asked, and the time that none such can beat."""

    sequence: Ints
    lower_bound: float


class KeptBytesProgram:
    """The program of a graph with an op between its halves, in the order of the graph or in any."""

    def __init__(self, wiring: Wiring, *, any_order: bool = False, back_end: str = HIGHS) -> None:
        self.wiring = wiring
        self._any_order = any_order
        self._back_end = back_end
        self._boundary = wiring.graph.boundary_index
        self._candidates = self._find_candidates()
        self._forced = self._find_forced()
        self._values, self._ops = self._number()
        self._program = self._write()

    def least_bytes(self, seconds: float) -> tuple[int, int]:
        """Find the least that can be kept: what was found, and what is proved.

        The first is what storing all would keep if time is out.
        """
        forced = self._forced_bytes()
        if not self._ops:
            return self.store_all_bytes(), self.store_all_bytes()
        sizes = self._sizes()
        scale = _SCALE / max(1.0, float(sizes.sum()))
        cost = np.concatenate([sizes * scale, np.zeros(len(self._ops))])
        answer = solve_program(dataclasses.replace(self._program, cost=cost), seconds=seconds)
        least = self.store_all_bytes()
        if answer.point is not None:
            least = forced + self._bytes_kept(answer.point)
        proved = forced
        if np.isfinite(answer.bound) and doubt_of(HIGHS) is None:
            proved += max(
                0, int(np.ceil(answer.bound * (1 - _TOLERANCE) / scale - _TOLERANCE / scale))
            )
        if proved > least:
            distrust(HIGHS, f"it said that {proved} bytes must be kept, but a point keeps {least}")
            proved = forced
        return least, proved

    def fastest(self, kept_bytes: int, seconds: float) -> BoundedSequence | None:
        """Find the fastest sequence that keeps at most so many bytes; `None` if none is found."""
        once = self.wiring.graph.time
        room = kept_bytes - self._forced_bytes()
        if room < 0:
            return None
        if kept_bytes >= self.store_all_bytes():
            return BoundedSequence(self._sequence(set()), once)
        if seconds <= 0:  # to write the program takes longer than that
            return None
        answer, bound = self._solve_within(room, seconds)
        if answer.point is None:
            return None
        again = {
            op
            for op, x in zip(self._ops, answer.point[len(self._values) :], strict=True)
            if x > 0.5
        }
        return BoundedSequence(self._sequence(again), bound)

    def bound(self, budget_bytes: int, seconds: float) -> float:
        """Bound the time of every schedule within a budget; infinity if there is none."""
        wiring, op = self.wiring, self._boundary
        beside = wiring.output_bytes[op] + wiring.workspace_list[op]
        reused = sum(int(wiring.size[v]) for v in wiring.overwritten[op])
        room = budget_bytes - beside + reused - self._forced_bytes()
        if room < 0:
            return math.inf
        if not self._ops:
            return wiring.graph.time
        answer, bound = self._solve_within(room, seconds)
        return math.inf if answer.outcome is Outcome.INFEASIBLE else bound

    def store_all_bytes(self) -> int:
        """Say what is kept if nothing runs again."""
        return sum(int(self.wiring.size[v]) for v in self._candidates | self._forced)

    def _solve_within(self, room: int, seconds: float) -> tuple[Answer, float]:
        """Minimise the time of what runs again; return also the time that is proved."""
        program, sizes = self._program, self._sizes()
        times = self.wiring.time[np.array(self._ops, dtype=np.int64)]
        scale = _SCALE / max(float(times.sum()), 1e-300)
        unit = _SCALE / max(1, room)
        row = sparse.csr_array(np.concatenate([sizes * unit, np.zeros(len(self._ops))])[None, :])
        bounded = dataclasses.replace(
            program,
            cost=np.concatenate([np.zeros(len(self._values)), times * scale]),
            matrix=sparse.csr_array(sparse.vstack([program.matrix, row])),
            right=np.concatenate([program.right, [room * unit]]),
        )
        answer = solve_program(bounded, seconds=seconds, back_end=self._back_end)
        bound = self.wiring.graph.time
        if np.isfinite(answer.bound) and doubt_of(self._back_end) is None:
            bound += max(0.0, (answer.bound * (1 - _TOLERANCE) - _TOLERANCE) / scale)
        return answer, bound

    def _find_forced(self) -> frozenset[int]:
        """Values that are alive at the boundary whatever is planned: those it reads."""
        return frozenset(self.wiring.inputs[self._boundary])

    def _find_candidates(self) -> frozenset[int]:
        """Values of the forward half that are read after the boundary, or returned."""
        wiring, boundary = self.wiring, self._boundary
        before, after = set(range(boundary)), set(range(boundary + 1, wiring.op_count))
        if self._any_order:
            before, after = _needed_by(wiring.graph, boundary), _needing(wiring.graph, boundary)
        read = {v for op in after for v in wiring.inputs[op]}
        read |= set(wiring.results.tolist())
        return frozenset(v for v in read if wiring.producer_list[v] in before)

    def _number(self) -> tuple[list[int], list[int]]:
        """List the values that may be kept, and the ops that may have to run again for them."""
        wiring = self.wiring
        values: set[int] = set()
        ops: set[int] = set()
        waiting = [v for v in self._candidates if v not in self._forced]
        while waiting:
            v = waiting.pop()
            if v in values:
                continue
            values.add(v)
            op = wiring.producer_list[v]
            if wiring.replayable_list[op] and op not in ops:
                ops.add(op)
                waiting.extend(u for u in wiring.inputs[op] if u not in self._forced)
        return sorted(values), sorted(ops)

    def _write(self) -> Program:
        """Write the rows that say what must be kept or made again; no cost yet."""
        wiring, count = self.wiring, len(self._values)
        value_at = {v: i for i, v in enumerate(self._values)}
        op_at = {op: count + i for i, op in enumerate(self._ops)}
        rows: list[dict[int, float]] = []
        right: list[float] = []

        def require(v: int, reader: int | None) -> None:
            if v in self._forced:
                return
            row = {value_at[v]: -1.0}
            producer = op_at.get(wiring.producer_list[v])
            if producer is not None:
                row[producer] = -1.0
            if reader is not None:
                row[reader] = 1.0
            rows.append(row)
            right.append(-1.0 if reader is None else 0.0)

        for v in sorted(self._candidates):
            require(v, None)
        for op in self._ops:
            for v in wiring.inputs[op]:
                require(v, op_at[op])
        columns = [column for row in rows for column in row]
        data = [weight for row in rows for weight in row.values()]
        starts = np.cumsum([0, *(len(row) for row in rows)])
        total = count + len(self._ops)
        return Program(
            cost=np.zeros(total),
            matrix=sparse.csr_array((data, columns, starts), shape=(len(rows), total)),
            right=np.array(right, dtype=np.float64),
            lower=np.zeros(total),
            upper=np.ones(total),
            integral=np.ones(total, dtype=np.bool_),
        )

    def _sizes(self) -> Floats:
        """Sizes of the values that may be kept; those only read by what runs again count too."""
        sizes: Floats = self.wiring.size[np.array(self._values, dtype=np.int64)].astype(np.float64)
        return sizes

    def _bytes_kept(self, point: Floats) -> int:
        kept: NDArray[np.bool_] = point[: len(self._values)] > 0.5
        return int(self.wiring.size[np.array(self._values, dtype=np.int64)][kept].sum())

    def _forced_bytes(self) -> int:
        return sum(int(self.wiring.size[v]) for v in self._forced)

    def _sequence(self, again: set[int]) -> Ints:
        """Run every op once, and those `again` as late after the boundary as they are needed."""
        wiring, boundary = self.wiring, self._boundary
        due: dict[int, list[int]] = {}
        soonest: dict[int, int] = {}
        for reader in range(boundary + 1, wiring.op_count):
            for v in wiring.inputs[reader]:
                soonest.setdefault(wiring.producer_list[v], reader)
        for v in wiring.results.tolist():
            soonest.setdefault(wiring.producer_list[v], wiring.op_count)
        for op in sorted(again, reverse=True):
            when = soonest.get(op)
            if when is None:
                continue
            due.setdefault(when, []).append(op)
            for v in wiring.inputs[op]:
                producer = wiring.producer_list[v]
                soonest[producer] = min(soonest.get(producer, when), when)
        order = list(range(boundary + 1))
        for reader in range(boundary + 1, wiring.op_count + 1):
            order.extend(reversed(due.get(reader, ())))
            if reader < wiring.op_count:
                order.append(reader)
        return np.array(order, dtype=np.int64)


def _needed_by(graph: Graph, boundary: int) -> set[int]:
    """List the ops that run before that at the boundary in every order."""
    needed: set[int] = set()
    waiting = [boundary]
    while waiting:
        op = graph.ops[waiting.pop()]
        producers = [graph.producer[v] for v in op.inputs if v in graph.producer]
        earlier = {*producers, *(graph.op_index[name] for name in op.order_after)} - needed
        needed |= earlier
        waiting += earlier
    return needed


def _needing(graph: Graph, boundary: int) -> set[int]:
    """List the ops that run after that at the boundary in every order."""
    needing, names = {boundary}, {graph.ops[boundary].name}
    outputs = set(graph.ops[boundary].outputs)
    for i, op in enumerate(graph.ops[boundary + 1 :], boundary + 1):
        if outputs.intersection(op.inputs) or names.intersection(op.order_after):
            needing.add(i)
            names.add(op.name)
            outputs.update(op.outputs)
    return needing - {boundary}
