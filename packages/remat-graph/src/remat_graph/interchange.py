"""Graphs to and from networkx, so that any tool's DAG can be planned.

Two forms are read. The plain form has one node per operation, which makes one value read along each
of its outgoing edges: node attributes `time` (default 1.0), `size_bytes` (default 1),
`workspace_bytes` (default 0). The exact form is the bipartite one that `to_networkx` writes; it
keeps everything.
"""

from __future__ import annotations

from typing import Any

import networkx as nx

from remat_graph.errors import InvalidGraph
from remat_graph.graph import Graph, Op, Stage, Value

__all__ = ["from_networkx", "to_networkx"]


def to_networkx(graph: Graph) -> nx.DiGraph[Any]:
    """Write the bipartite DAG of ops (`("op", name)`) and values (`("value", name)`).

    Node attributes are the fields of `Op` and `Value`, with `position`, `resident` and `result`;
    edges carry the `slot` of the value in the op's inputs or outputs.
    """
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
    nodes; a node attribute `stage="backward"` puts it in the backward half. Soft dependencies
    are edges with the attribute `soft=True`.

    Raises:
        InvalidGraph: if the graph is undirected, has a cycle, two nodes have the same name, or an
            attribute is not valid.
    """
    if not dag.is_directed() or dag.is_multigraph():
        raise InvalidGraph(f"need a networkx.DiGraph, not a {type(dag).__name__}")
    if dag.graph.get("remat") == "bipartite":
        return _from_bipartite(dag)
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
        stage = Stage(data.get("stage", "forward"))
        if stage is Stage.BACKWARD and boundary is None:
            boundary = names[node]
        before = sorted(dag.predecessors(node), key=place.__getitem__)
        hard = tuple(names[p] for p in before if not dag.edges[p, node].get("soft", False))
        soft = tuple(names[p] for p in before if dag.edges[p, node].get("soft", False))
        values.append(Value(names[node], int(data.get("size_bytes", 1))))
        ops.append(
            Op(
                names[node],
                hard,
                (names[node],),
                float(data.get("time", 1.0)),
                int(data.get("workspace_bytes", 0)),
                stage,
                equivalence=data.get("equivalence"),
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
    try:
        order = list(nx.topological_sort(dag))
    except nx.NetworkXUnfeasible as error:
        cycle = " -> ".join(str(edge[0]) for edge in nx.find_cycle(dag))
        raise InvalidGraph(f"the graph has a cycle: {cycle} -> back; it must be a DAG") from error
    if order and all("position" in dag.nodes[node] for node in order):
        order.sort(key=lambda node: dag.nodes[node]["position"])
    elif any("stage" in dag.nodes[node] for node in order):
        order.sort(key=lambda node: dag.nodes[node].get("stage", "forward") == "backward")
    return order


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
            )
            for node, data in ops
        ),
        resident=frozenset(node[1] for node, data in values if data["resident"]),
        results=frozenset(node[1] for node, data in values if data["result"]),
        boundary=dag.graph["boundary"],
    )
