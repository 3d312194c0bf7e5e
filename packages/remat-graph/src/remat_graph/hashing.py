"""Names left out: when two operations, or two graphs, are the same work on the same bytes.

Two operations are equivalent if they carry the same `equivalence`, or, without one, the same costs
and sizes. A graph's canonical hash is over its operations in order, each as its equivalence and the
positions of what it reads and makes, so renaming anything leaves it unchanged. Linear time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

from remat_graph.graph import Graph, Op

__all__ = ["canonical_hash", "equivalence_classes"]


def equivalence_classes(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Group the operations that run the same code on the same sizes; groups by first occurrence."""
    groups: dict[Hashable, list[str]] = {}
    for op in graph.ops:
        groups.setdefault(_op_key(graph, op), []).append(op.name)
    return tuple(tuple(names) for names in groups.values())


def canonical_hash(graph: Graph) -> str:
    """Hash a graph up to the names of its ops and values: 64 hexadecimal digits.

    Equal for two graphs exactly when a renaming that keeps the order of ops, and of the inputs and
    outputs of each, turns one into the other (SHA-256 collisions aside). Neither the order of
    `values` nor that within an `order_after` matters; values that no op touches count by their
    size and by whether they are results.
    """
    number: dict[str, int] = {}

    def position(value: str) -> int:
        return number.setdefault(value, len(number))

    digest = hashlib.sha256(b"remat-graph canonical 2")
    op_index, sizes = graph.op_index, graph.value_by_name
    for op in graph.ops:
        row = (
            _op_key(graph, op),
            op.workspace_bytes,
            op.time,
            op.stage.value,
            op.replayable,
            tuple(position(v) for v in op.inputs),
            tuple(position(v) for v in op.outputs),
            None if op.twin is None else op_index[op.twin],
            tuple(sorted({op_index[earlier] for earlier in op.order_after})),
            tuple(sorted((position(read), position(written)) for read, written in op.overwrites)),
            None if op.alternative_of is None else op_index[op.alternative_of],
            op.optional,
            op.numerics.value,
        )
        digest.update(repr(row).encode())
    for v, _ in sorted(number.items(), key=lambda item: item[1]):
        row_v = (sizes[v].size_bytes, v in graph.resident, v in graph.results)
        digest.update(repr(row_v).encode())
    untouched = sorted(
        (v.size_bytes, v.name in graph.results) for v in graph.values if v.name not in number
    )
    digest.update(repr((untouched, graph.boundary_index)).encode())
    return digest.hexdigest()


def _op_key(graph: Graph, op: Op) -> Hashable:
    sizes = graph.value_by_name
    return (
        op.equivalence if op.equivalence is not None else (op.time, op.workspace_bytes),
        tuple(sizes[v].size_bytes for v in op.inputs),
        tuple(sizes[v].size_bytes for v in op.outputs),
    )
