"""What a block stands for in training: a graph of its own, and how it meets the rest.

The subgraph of a block has its forward ops and the backward ops that sit with them (see
`placement`), in the order of the whole graph. What it reads and does not make is resident in it:
whoever plans the level above holds it, so nothing here overwrites it. What others need of it is a
result. A twin or a soft dependency outside is left out: the order of the blocks keeps it. The loss
is in the subgraph of the root alone.

Values stand in the order in which ops first mention them, which no name has a part in. So two
subgraphs that are equal up to names are equal position by position (see `unique_blocks`).
Linear in the subgraph, but for the sorting of its ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from remat_graph.graph import Graph, Op

__all__ = ["Subgraph", "cut_out"]


@dataclass(frozen=True, slots=True)
class Subgraph:
    """The forward and backward half of a block as a graph, and the values at its border by role.

    `parameters` are resident in the whole graph. `inputs` and `gradients_in` are made by forward
    and by backward ops elsewhere (the loss is one of the latter) and read here; `outputs` and
    `gradients_out` are made by forward and by backward ops here and needed elsewhere, or results
    of the whole graph. `saved` is made by forward ops here and read by backward ops here, and by
    nobody else: what an option may keep between the halves, or make again. `readers` says for each
    of the outputs and gradients out who needs it: forward ops elsewhere, backward ops elsewhere,
    the user.
    """

    graph: Graph
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    gradients_in: tuple[str, ...]
    saved: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients_out: tuple[str, ...]
    readers: tuple[tuple[bool, bool, bool], ...]

    @property
    def forward(self) -> tuple[Op, ...]:
        """The forward ops."""
        return self.graph.ops[: self.graph.boundary_index]

    @property
    def backward(self) -> tuple[Op, ...]:
        """The backward ops."""
        return self.graph.ops[self.graph.boundary_index :]


def cut_out(graph: Graph, indices: Sequence[int]) -> Subgraph:
    """Make the subgraph of the ops at these positions, which are ascending."""
    inside = set(indices)
    first = graph.boundary_index
    ops = tuple(_without_outside(graph, graph.ops[i], inside) for i in indices)
    mentioned = list(dict.fromkeys(v for op in ops for v in (*op.inputs, *op.outputs)))
    roles = _Roles()
    for v in mentioned:
        maker = graph._producer.get(v)
        if maker is None:
            roles.parameters.append(v)
        elif maker not in inside:
            (roles.inputs if maker < first else roles.gradients_in).append(v)
        else:
            readers = _readers_outside(graph, v, inside, first)
            if any(readers):
                (roles.outputs if maker < first else roles.gradients_out)[v] = readers
            elif maker < first and any(i >= first for i in graph._consumers[v]):
                roles.saved.append(v)
    backward = next((i for i in indices if i >= first), None)
    leaving = {**roles.outputs, **roles.gradients_out}
    own = Graph(
        tuple(graph._value_by_name[v] for v in mentioned),
        ops,
        frozenset((*roles.parameters, *roles.inputs, *roles.gradients_in)),
        frozenset((*leaving, *graph.results.intersection(roles.parameters))),
        None if backward is None else graph.ops[backward].name,
    )
    return Subgraph(
        graph=own,
        parameters=tuple(roles.parameters),
        inputs=tuple(roles.inputs),
        gradients_in=tuple(roles.gradients_in),
        saved=tuple(roles.saved),
        outputs=tuple(roles.outputs),
        gradients_out=tuple(roles.gradients_out),
        readers=tuple(leaving.values()),
    )


@dataclass(slots=True)
class _Roles:
    """Values by role, as they are found; those that leave with who needs them."""

    parameters: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    gradients_in: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    outputs: dict[str, tuple[bool, bool, bool]] = field(default_factory=dict)
    gradients_out: dict[str, tuple[bool, bool, bool]] = field(default_factory=dict)


def _without_outside(graph: Graph, op: Op, inside: set[int]) -> Op:
    twin = op.twin if op.twin is None or graph._op_index[op.twin] in inside else None
    order_after = tuple(name for name in op.order_after if graph._op_index[name] in inside)
    overwrites = tuple(pair for pair in op.overwrites if graph._producer[pair[0]] in inside)
    if (twin, order_after, overwrites) == (op.twin, op.order_after, op.overwrites):
        return op
    return replace(op, twin=twin, order_after=order_after, overwrites=overwrites)


def _readers_outside(
    graph: Graph, value: str, inside: set[int], first: int
) -> tuple[bool, bool, bool]:
    outside = [i for i in graph._consumers[value] if i not in inside]
    return (
        bool(outside) and outside[0] < first,  # they ascend
        bool(outside) and outside[-1] >= first,
        value in graph.results,
    )
