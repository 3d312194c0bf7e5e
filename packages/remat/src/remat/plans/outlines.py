"""When a schedule of one graph is a schedule of another, and how it reads there.

The outline of a graph is what a schedule depends on: which operation reads what which made, how
often each may run, and how large the values are. It leaves out names, times and workspaces, what is
there before (its size alone counts), the order of the inputs of an operation, that of the gradients
of the outputs, and that of updates in place that follow one another: TorchDynamo and AOTAutograd
trace these differently. Sizes are in blocks of 512 bytes, as CUDA allocates. Graphs of equal
canonical hash of their outlines run each other's schedules.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

from remat_graph import (
    Compute,
    Free,
    Graph,
    Op,
    Schedule,
    Stage,
    Value,
    canonical_hash,
)

__all__ = ["Outline"]

_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class Outline:
    """The outline of a graph: a graph of its own, whose ops and values are named by position.

    `ops` are the names of the graph's ops in the order of the outline, `values` those of what they
    make, in the order in which it is made.
    """

    graph: Graph
    ops: tuple[str, ...]
    values: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph, *, as_made: bool = False) -> Outline:
        """Make the outline of a graph; `as_made` has the gradients of outputs in their order."""
        ordered = _ordered(graph)
        if not as_made:
            ordered = _with_gradients_in_order(ordered, graph)
        ops = tuple(op.name for op in ordered)
        values = tuple(dict.fromkeys(value for op in ordered for value in op.outputs))
        op_at = {name: index for index, name in enumerate(ops)}
        value_at = {name: index for index, name in enumerate(values)}
        size = graph.value_by_name

        def outlined(op: Op) -> Op:
            read = sorted(value_at[value] for value in op.inputs if value in value_at)
            resident = [_blocks(size[v].size_bytes) for v in op.inputs if v not in value_at]
            return Op(
                f"o{op_at[op.name]}",
                tuple(f"v{index}" for index in read),
                tuple(f"v{value_at[value]}" for value in op.outputs),
                0.0,
                stage=op.stage,
                equivalence=repr(sorted(resident)),
                replayable=op.replayable,
                order_after=tuple(
                    f"o{index}" for index in sorted(op_at[name] for name in op.order_after)
                ),
                overwrites=tuple(
                    (f"v{value_at[read]}", f"v{value_at[new]}") for read, new in op.overwrites
                ),
                alternative_of=None
                if op.alternative_of is None
                else f"o{op_at[op.alternative_of]}",
                optional=op.optional,
                numerics=op.numerics,
            )

        boundary = None if graph.boundary is None else f"o{op_at[graph.boundary]}"
        outline = Graph(
            tuple(
                Value(f"v{index}", _blocks(size[name].size_bytes))
                for index, name in enumerate(values)
            ),
            tuple(map(outlined, ordered)),
            results=frozenset(f"v{value_at[v]}" for v in graph.results if v in value_at),
            boundary=boundary,
        )
        return cls(outline, ops, values)

    @property
    def hash(self) -> str:
        """The canonical hash: 64 hexadecimal digits, equal for outlines that are the same."""
        return canonical_hash(self.graph)

    @property
    def nameless(self) -> Outline:
        """The same, of a graph whose names are those of the outline."""
        return Outline(
            self.graph,
            tuple(op.name for op in self.graph.ops),
            tuple(value.name for value in self.graph.values),
        )

    def translate(self, schedule: Schedule, there: Outline) -> Schedule:
        """Translate a schedule of this graph into the names of another with the same outline."""
        op_there = dict(zip(self.ops, there.ops, strict=True))
        value_there = dict(zip(self.values, there.values, strict=True))
        return Schedule(
            tuple(
                Compute(op_there[step.op])
                if isinstance(step, Compute)
                else Free(value_there[step.value])
                for step in schedule
            )
        )

    def difference(self, other: Outline, mine: str, its: str) -> str | None:
        """Say where two outlines first differ, `None` if they do not; `mine` and `its` name them.

        Names of ops are cut short and quoted: they may come from a file.
        """
        if self.hash == other.hash:
            return None
        counts = len(self.ops), len(other.ops)
        first = f"{counts[0]:,} ops in {mine}, {counts[1]:,} in {its}; " * (counts[0] != counts[1])
        for index in range(min(counts)):
            for ours, theirs in zip(self._facts(index), other._facts(index), strict=True):
                if ours != theirs:
                    kinds = dict.fromkeys((self._kind(index), other._kind(index)))
                    where = f"op {index} ({' or '.join(kinds)})"
                    return f"{first}{where} {ours} in {mine}, {theirs} in {its}"
        return first + "what is held to the end of the step differs"

    def _kind(self, index: int) -> str:
        return repr(re.sub(r"_\d+$", "", self.ops[index][:60]))

    def _facts(self, index: int) -> tuple[str, ...]:
        """Describe all that counts of an op."""
        graph = self.graph
        op, size = graph.ops[index], graph.value_by_name
        total = sum(size[value].size_bytes for value in op.outputs)
        makers = sorted({graph.producer[value] for value in op.inputs})
        return (
            f"is of the {op.stage.value}",
            f"makes {total:,} bytes",
            f"makes {[size[value].size_bytes for value in op.outputs]} bytes",
            f"reads inputs or parameters of {op.equivalence} bytes",
            f"reads what ops {', '.join(map(str, makers)) or '-'} make",
            f"reads {op.inputs}",
            "may run again" if op.replayable else "runs once",
            f"comes after {op.order_after}",
            f"overwrites {op.overwrites}",
            f"is {'' if op.owed else 'not '}owed, and {op.numerics}",
            f"stands for {op.alternative_of}",
            f"is {'' if op.name == graph.boundary else 'not '}the first of the backward",
            f"has {len(graph.results.intersection(op.outputs))} results",
        )


def _ordered(graph: Graph) -> list[Op]:
    """List the ops in order; of those in a row that make nothing, by what they read."""
    made_at = graph.producer

    def by_reads(op: Op) -> tuple[list[int], list[int]]:
        read = sorted(made_at[value] for value in op.inputs if value in made_at)
        return read, sorted(graph.op_index[name] for name in op.order_after)

    def key(op: Op) -> tuple[bool, Stage]:
        return bool(op.outputs) or op.name == graph.boundary, op.stage

    ordered: list[Op] = []
    for (in_order, _), run in itertools.groupby(graph.ops, key):
        ops = list(run)
        names = {op.name for op in ops}
        fixed = in_order or any(names.intersection(op.order_after) for op in ops)
        ordered.extend(ops if fixed else sorted(ops, key=by_reads))
    return ordered


def _with_gradients_in_order(ops: list[Op], graph: Graph) -> list[Op]:
    """Give these ops with the gradients of the outputs in the order in which the backward reads.

    The boundary makes them in the order of the outputs.
    """
    boundary = next((op for op in ops if op.name == graph.boundary), None)
    if boundary is None:
        return ops
    read_at: dict[str, list[int]] = {value: [] for value in boundary.outputs}
    for index, op in enumerate(ops):
        for value in read_at.keys() & set(op.inputs):
            read_at[value].append(index)
    made = sorted(boundary.outputs, key=lambda value: read_at[value])
    return [replace(op, outputs=tuple(made)) if op is boundary else op for op in ops]


def _blocks(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
