"""A graph as integer arrays, the form in which the searches of this package work.

Resident values are left out: they are always alive and weigh nothing. Everything else keeps the
order of the graph, so that op `i` is `graph.ops[i]`.

No sequence holds more at once than every value and the largest workspace (`total_bytes`), however
often it computes them. The proofs of `bottleneck` add up two such sums, one of values and one of
what an op needs, so that a total of up to `MOST_BYTES` stays within 64 bits everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat_graph import Compute, Free, Graph, Schedule

__all__ = [
    "MOST_BYTES",
    "Floats",
    "Ints",
    "Wiring",
    "expand",
    "in_order",
    "sequence_of",
    "total_bytes",
]

MOST_BYTES = 2**62 - 1

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """Who reads and makes what, in compressed rows: op `i` reads `in_value[in_start[i]:...]`.

    `in_op` and `out_op` are the op of each read and of each output. `slot[v]` is the position of
    value `v` in the outputs of its producer; `values` are the names. Of a value with several
    implementations the producer is the first, and the others have it in their outputs;
    `core.alternatives` has more of these. `in_overwritten` says of each read whether the op can
    overwrite what it reads, if that ends there; `overwritten[i]` are the values that op `i` can
    overwrite. The `..._list` fields repeat an array in plain numbers, for walks in Python;
    `output_bytes[i]` is the size of all outputs of op `i`.
    """

    graph: Graph
    values: tuple[str, ...]
    size: Ints
    producer: Ints
    slot: Ints
    time: Floats
    workspace: Ints
    replayable: NDArray[np.bool_]
    in_start: Ints
    in_value: Ints
    in_op: Ints
    in_overwritten: NDArray[np.bool_]
    out_start: Ints
    out_value: Ints
    out_op: Ints
    results: Ints
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    overwritten: tuple[tuple[int, ...], ...]
    producer_list: tuple[int, ...]
    slot_list: tuple[int, ...]
    time_list: tuple[float, ...]
    replayable_list: tuple[bool, ...]
    output_bytes: tuple[int, ...]
    workspace_list: tuple[int, ...]

    @classmethod
    def of(cls, graph: Graph) -> Wiring:
        """Wire a graph; values are numbered in the order in which they are made."""
        names = list(dict.fromkeys(v for op in graph.ops for v in op.outputs))
        number = {name: i for i, name in enumerate(names)}
        inputs = tuple(tuple(number[v] for v in op.inputs if v in number) for op in graph.ops)
        outputs = tuple(tuple(number[v] for v in op.outputs) for op in graph.ops)
        overwritten = tuple(tuple(number[v] for v, _ in op.overwrites) for op in graph.ops)
        in_start, in_value = _rows(inputs)
        out_start, out_value = _rows(outputs)
        sizes = [graph.value_by_name[v].size_bytes for v in names]
        in_op, out_op = (
            np.repeat(np.arange(len(graph.ops)), np.diff(start)) for start in (in_start, out_start)
        )
        first = np.unique(out_value, return_index=True)[1]
        producer = out_op[first]
        slots = first - out_start[producer]
        return cls(
            graph=graph,
            values=tuple(names),
            size=np.array(sizes, dtype=np.int64),
            producer=producer,
            slot=slots,
            time=np.array([op.time for op in graph.ops], dtype=np.float64),
            workspace=np.array([op.workspace_bytes for op in graph.ops], dtype=np.int64),
            replayable=np.array([op.replayable for op in graph.ops], dtype=np.bool_),
            in_start=in_start,
            in_value=in_value,
            in_op=in_op,
            in_overwritten=np.array(
                [v in gone for row, gone in zip(inputs, overwritten, strict=True) for v in row],
                dtype=np.bool_,
            ),
            out_start=out_start,
            out_value=out_value,
            out_op=out_op,
            results=np.array(sorted(number[v] for v in graph.results if v in number), np.int64),
            inputs=inputs,
            outputs=outputs,
            overwritten=overwritten,
            producer_list=tuple(producer.tolist()),
            slot_list=tuple(slots.tolist()),
            time_list=tuple(op.time for op in graph.ops),
            replayable_list=tuple(op.replayable for op in graph.ops),
            output_bytes=tuple(sum(sizes[v] for v in row) for row in outputs),
            workspace_list=tuple(op.workspace_bytes for op in graph.ops),
        )

    @property
    def op_count(self) -> int:
        """Number of operations."""
        return len(self.time)

    @property
    def value_count(self) -> int:
        """Number of values that are not resident."""
        return len(self.size)

    @property
    def has_several_producers(self) -> bool:
        """Whether several ops make some value."""
        return len(self.out_value) > self.value_count


def _rows(rows: tuple[tuple[int, ...], ...]) -> tuple[Ints, Ints]:
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.array([item for row in rows for item in row], dtype=np.int64)


def expand(wiring: Wiring, sequence: Ints) -> Schedule:
    """Turn a sequence of computations into steps, freeing every value right after its last use.

    A value that nothing reads before it is made again, or ever, is freed right after it was made.
    Results stay. Linear time.
    """
    ops, names = wiring.graph.ops, wiring.values
    order: list[int] = sequence.tolist()
    needed = [False] * wiring.value_count
    for v in wiring.results.tolist():
        needed[v] = True
    freed: list[list[int]] = [[] for _ in order]
    for position in range(len(order) - 1, -1, -1):
        op = order[position]
        for v in wiring.outputs[op]:
            if not needed[v]:
                freed[position].append(v)
            needed[v] = False
        for v in wiring.inputs[op]:
            if not needed[v]:
                freed[position].append(v)
                needed[v] = True
    steps: list[Compute | Free] = []
    for op, dying in zip(order, freed, strict=True):
        steps.append(Compute(ops[op].name))
        steps.extend(Free(names[v]) for v in dying)
    return Schedule(tuple(steps))


def sequence_of(wiring: Wiring, schedule: Schedule) -> Ints:
    """List the computations of a schedule as op numbers; the other way round from `expand`.

    Raises:
        KeyError: if it computes an op that the graph does not have.
    """
    index = wiring.graph.op_index
    ops = [index[step.op] for step in schedule if isinstance(step, Compute)]
    return np.array(ops, dtype=np.int64)


def in_order(wiring: Wiring, schedule: Schedule) -> Ints | None:
    """List the computations of a schedule; `None` if as a sequence they are not legal in order.

    They are if all ops are computed, the first time in the order of the graph, and those that must
    not run again only then.

    Raises:
        KeyError: if it computes an op that the graph does not have.
    """
    sequence = sequence_of(wiring, schedule)
    firsts = dict.fromkeys(sequence.tolist())
    if list(firsts) != list(range(wiring.op_count)):
        return None
    times = np.bincount(sequence, minlength=wiring.op_count)
    return None if (times[~wiring.replayable] > 1).any() else sequence


def total_bytes(graph: Graph) -> int:
    """Sum all values that are not resident, and the largest workspace."""
    values = sum(v.size_bytes for v in graph.values if v.name not in graph.resident)
    return values + max((op.workspace_bytes for op in graph.ops), default=0)
