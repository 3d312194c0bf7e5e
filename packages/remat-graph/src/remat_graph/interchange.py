"""Graphs to and from networkx, so that any tool's DAG can be planned.

Two forms are read. The plain form has one node per operation, which makes one value read along each
of its outgoing edges: node attributes `time` (default 1.0), `size_bytes` (default 1),
`workspace_bytes` (default 0), `stage`, `twin`, `equivalence`, `replayable`. The exact form is the
bipartite one that `to_networkx` writes; it keeps everything.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from remat_graph.errors import InvalidGraph
from remat_graph.graph import Graph, Numerics, Op, Stage, Value

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["from_networkx", "to_networkx"]


def to_networkx(graph: Graph) -> nx.DiGraph[Any]:
    """Write the bipartite DAG of ops (`("op", name)`) and values (`("value", name)`).

    Node attributes are the fields of `Op` and `Value`, with `position`, `resident` and `result`;
    edges carry the `slot` of the value in the op's inputs or outputs.
    """
    import networkx as nx  # noqa: PLC0415 - more to import than all else of this package

    dag: nx.DiGraph[Any] = nx.DiGraph(boundary=graph.boundary, remat="bipartite")
    for value in graph.values:
        dag.add_node(
            ("value", value.name),
            kind="value",
            size_bytes=value.size_bytes,
            resident=value.name in graph.resident,
            result=value.name in graph.results,
        )
    for position, op in enumerate(graph.ops):
        node = ("op", op.name)
        dag.add_node(
            node,
            kind="op",
            position=position,
            time=op.time,
            workspace_bytes=op.workspace_bytes,
            stage=op.stage.value,
            twin=op.twin,
            equivalence=op.equivalence,
            replayable=op.replayable,
            order_after=op.order_after,
            overwrites=op.overwrites,
            alternative_of=op.alternative_of,
            optional=op.optional,
            numerics=op.numerics.value,
            provenance=op.provenance,
        )
        for slot, v in enumerate(op.inputs):
            dag.add_edge(("value", v), node, slot=slot)
        for slot, v in enumerate(op.outputs):
            dag.add_edge(node, ("value", v), slot=slot)
    return dag


def from_networkx(dag: nx.DiGraph[Any], *, results: set[Any] | None = None) -> Graph:
    """Read a DAG in the plain form, or in the form that `to_networkx` writes.

    In the plain form nodes are ordered by their attribute `position` where all have one, else
    topologically with ties in the order of insertion; sinks are results unless `results` names the
    nodes; a node attribute `stage="backward"` puts it in the backward half, and `twin` is the node
    that it differentiates. Soft dependencies are edges with the attribute `soft=True`.

    Raises:
        InvalidGraph: if the graph is undirected, has a cycle, two nodes have the same name, an
            attribute is not valid, or `results` is given for a graph that has its own.
    """
    if not dag.is_directed() or dag.is_multigraph():
        raise InvalidGraph(f"need a networkx.DiGraph, not a {type(dag).__name__}")
    if dag.graph.get("remat") == "bipartite":
        if results is not None:
            raise InvalidGraph("a graph that to_networkx wrote names its results; leave them out")
        try:
            return _from_bipartite(dag)
        except KeyError as error:
            raise InvalidGraph(f"the bipartite graph lacks the attribute {error}") from error
    return _from_plain(dag, results)


def _from_plain(dag: nx.DiGraph[Any], results: set[Any] | None) -> Graph:
    names = {node: str(node) for node in dag}
    if len(set(names.values())) != len(names):
        raise InvalidGraph("two nodes have the same str(); give every node a name of its own")
    unknown = sorted(str(node) for node in (results or set()) if node not in names)
    if unknown:
        raise InvalidGraph(f"result {unknown[0]!r} is no node of the graph")
    order = _order(dag)
    place = {node: i for i, node in enumerate(order)}
    ops = []
    values = []
    boundary = None
    for node in order:
        data = dag.nodes[node]
        stage = _stage(names[node], data)
        if stage is Stage.BACKWARD and boundary is None:
            boundary = names[node]
        before = sorted(dag.predecessors(node), key=place.__getitem__)
        hard = tuple(names[p] for p in before if not dag.edges[p, node].get("soft", False))
        soft = tuple(names[p] for p in before if dag.edges[p, node].get("soft", False))
        twin, equivalence = data.get("twin"), data.get("equivalence")
        values.append(Value(names[node], _whole(names[node], "size_bytes", data, 1)))
        ops.append(
            Op(
                names[node],
                hard,
                (names[node],),
                _number(names[node], "time", data, 1.0),
                _whole(names[node], "workspace_bytes", data, 0),
                stage,
                twin=None if twin is None else str(twin),
                equivalence=None if equivalence is None else str(equivalence),
                replayable=bool(data.get("replayable", True)),
                order_after=soft,
            )
        )
    if results is None:
        results = {
            n for n in dag if not any(not d.get("soft") for *_, d in dag.out_edges(n, data=True))
        }
    return Graph(
        tuple(values), tuple(ops), results=frozenset(names[n] for n in results), boundary=boundary
    )


def _order(dag: nx.DiGraph[Any]) -> list[Any]:
    import networkx as nx  # noqa: PLC0415 - as above

    inserted = {node: i for i, node in enumerate(dag)}
    try:
        order = list(nx.lexicographical_topological_sort(dag, key=inserted.__getitem__))
    except nx.NetworkXUnfeasible as error:
        cycle = " -> ".join(str(edge[0]) for edge in nx.find_cycle(dag))
        raise InvalidGraph(f"the graph has a cycle: {cycle} -> back; it must be a DAG") from error
    if order and all("position" in dag.nodes[node] for node in order):
        order.sort(key=lambda node: _number(str(node), "position", dag.nodes[node], 0.0))
    elif any("stage" in dag.nodes[node] for node in order):
        order.sort(key=lambda node: _stage(str(node), dag.nodes[node]) is Stage.BACKWARD)
    return order


def _number(node: str, name: str, data: dict[str, Any], default: float) -> float:
    try:
        return float(data.get(name, default))
    except (TypeError, ValueError) as error:
        raise InvalidGraph(
            f"node {node!r} has {name}={data[name]!r}; it must be a number"
        ) from error


def _whole(node: str, name: str, data: dict[str, Any], default: int) -> int:
    number = data.get(name, default)
    try:
        return int(number) if isinstance(number, float) and number.is_integer() else index(number)
    except TypeError as error:
        raise InvalidGraph(f"node {node!r} has {name}={number!r}; it must be whole") from error


def _stage(node: str, data: dict[str, Any]) -> Stage:
    try:
        return Stage(data.get("stage", "forward"))
    except ValueError as error:
        raise InvalidGraph(
            f"node {node!r} has stage={data['stage']!r}; it must be 'forward' or 'backward'"
        ) from error


def _from_bipartite(dag: nx.DiGraph[Any]) -> Graph:
    values = [(node, data) for node, data in dag.nodes(data=True) if data["kind"] == "value"]
    ops = sorted(
        ((node, data) for node, data in dag.nodes(data=True) if data["kind"] == "op"),
        key=lambda item: item[1]["position"],
    )

    def by_slot(edges: Any, end: int) -> tuple[str, ...]:
        return tuple(edge[end][1] for edge in sorted(edges, key=lambda edge: edge[2]["slot"]))

    return Graph(
        values=tuple(Value(node[1], data["size_bytes"]) for node, data in values),
        ops=tuple(
            Op(
                node[1],
                by_slot(dag.in_edges(node, data=True), 0),
                by_slot(dag.out_edges(node, data=True), 1),
                data["time"],
                data["workspace_bytes"],
                Stage(data["stage"]),
                data["twin"],
                data["equivalence"],
                data["replayable"],
                tuple(data["order_after"]),
                tuple((read, written) for read, written in data["overwrites"]),
                data["alternative_of"],
                data["optional"],
                Numerics(data["numerics"]),
                data["provenance"],
            )
            for node, data in ops
        ),
        resident=frozenset(node[1] for node, data in values if data["resident"]),
        results=frozenset(node[1] for node, data in values if data["result"]),
        boundary=dag.graph["boundary"],
    )
