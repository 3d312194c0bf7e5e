import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import (
    Graph,
    InvalidGraph,
    Op,
    Stage,
    Value,
    canonical_hash,
    from_networkx,
    to_networkx,
)


@given(data=st.data())
def test_the_bipartite_form_keeps_everything(graphs, data):
    graph = data.draw(graphs())
    dag = to_networkx(graph)
    assert nx.is_directed_acyclic_graph(dag)
    assert from_networkx(dag) == graph


def test_the_bipartite_form_does_not_depend_on_the_order_of_nodes_and_edges(diamond):
    dag = to_networkx(diamond)
    other = nx.DiGraph(**dag.graph)
    other.add_nodes_from(reversed(list(dag.nodes(data=True))))
    other.add_edges_from(reversed(list(dag.edges(data=True))))
    assert canonical_hash(from_networkx(other)) == canonical_hash(diamond)


def test_the_bipartite_form(diamond):
    dag = to_networkx(diamond)
    assert dag.nodes["value", "stats"] == {
        "kind": "value", "size_bytes": 1, "resident": False, "result": False,
    }  # fmt: skip
    assert dag.nodes["op", "dL"]["twin"] == "L"
    assert dag.edges[("op", "B"), ("value", "stats")] == {"slot": 1}
    assert dag.graph["boundary"] == "dL"


def test_the_plain_form():
    dag = nx.DiGraph()
    dag.add_node("conv", time=2, size_bytes=8, workspace_bytes=3, equivalence="k")
    dag.add_node("relu", size_bytes=8.0)
    dag.add_node("sync", size_bytes=0, replayable=False)
    dag.add_node(("d", 1), stage="backward", twin="conv")
    dag.add_edges_from([("conv", "relu"), ("relu", ("d", 1))])
    dag.add_edge("relu", "sync", soft=True)
    assert from_networkx(dag) == Graph(
        values=(Value("conv", 8), Value("relu", 8), Value("sync", 0), Value("('d', 1)", 1)),
        ops=(
            Op("conv", (), ("conv",), 2.0, 3, equivalence="k"),
            Op("relu", ("conv",), ("relu",), 1.0),
            Op("sync", (), ("sync",), 1.0, replayable=False, order_after=("relu",)),
            Op("('d', 1)", ("relu",), ("('d', 1)",), 1.0, stage=Stage.BACKWARD, twin="conv"),
        ),
        results=frozenset({"sync", "('d', 1)"}),
        boundary="('d', 1)",
    )


def test_results_may_be_named():
    dag = nx.path_graph(3, create_using=nx.DiGraph)
    assert from_networkx(dag).results == {"2"}
    assert from_networkx(dag, results={0, 1}).results == {"0", "1"}
    assert from_networkx(dag, results=set()).results == frozenset()
    with pytest.raises(InvalidGraph, match="result 'zzz' is no node"):
        from_networkx(dag, results={"zzz"})
    with pytest.raises(InvalidGraph, match="names its results"):
        from_networkx(to_networkx(from_networkx(dag)), results={"2"})


def test_a_source_of_soft_edges_only_is_a_result():
    dag = nx.DiGraph()
    dag.add_edge("a", "b", soft=True)
    assert from_networkx(dag).results == {"a", "b"}


@given(
    order=st.permutations(range(6)),
    edges=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=9),
)
def test_ties_are_broken_by_insertion(order, edges):
    """The first insertion-ordered node that is ready comes next, found here by definition."""
    dag = nx.DiGraph()
    dag.add_nodes_from(order)
    dag.add_edges_from((min(e), max(e)) for e in edges if e[0] != e[1])
    expected = []
    while len(expected) < 6:
        ready = (n for n in order if n not in expected and set(dag.pred[n]) <= set(expected))
        expected.append(next(ready))
    assert [int(op.name) for op in from_networkx(dag).ops] == expected


def test_positions_decide_the_order():
    dag = nx.DiGraph()
    dag.add_nodes_from([("a", {"position": 2}), ("b", {"position": 0}), ("c", {"position": 1})])
    assert [op.name for op in from_networkx(dag).ops] == ["b", "c", "a"]
    dag.add_edge("a", "b")
    with pytest.raises(InvalidGraph, match="'b' reads 'a' before any op"):
        from_networkx(dag)


def test_backward_nodes_come_last():
    dag = nx.DiGraph()
    dag.add_node("db", stage="backward")
    dag.add_nodes_from(["a", "b"])
    dag.add_edge("a", "db")
    graph = from_networkx(dag)
    assert [op.name for op in graph.ops] == ["a", "b", "db"]
    assert graph.boundary == "db"


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"time": "slow"}, "node 'n' has time='slow'; it must be a number"),
        ({"time": None}, "time=None"),
        ({"time": -1}, "time=-1"),
        ({"time": float("nan")}, "time=nan"),
        ({"size_bytes": 1.5}, "node 'n' has size_bytes=1.5; it must be whole"),
        ({"size_bytes": "8"}, "size_bytes='8'"),
        ({"size_bytes": -8}, "size_bytes=-8"),
        ({"workspace_bytes": float("inf")}, "workspace_bytes=inf"),
        ({"workspace_bytes": None}, "workspace_bytes=None"),
        ({"stage": "sideways"}, "node 'n' has stage='sideways'"),
        ({"position": "first"}, "position='first'"),
        ({"twin": "zzz"}, "twin 'zzz'"),
    ],
)
def test_attributes_are_checked(attributes, match):
    dag = nx.DiGraph()
    dag.add_node("n", **attributes)
    with pytest.raises(InvalidGraph, match=match):
        from_networkx(dag)


def test_large_sizes_stay_exact():
    dag = nx.DiGraph()
    dag.add_node("n", size_bytes=2**60 + 1)
    assert from_networkx(dag).values[0].size_bytes == 2**60 + 1


@pytest.mark.parametrize(
    ("edges", "match"),
    [
        ([("a", "b"), ("b", "c"), ("c", "a")], "cycle: a -> b -> c -> back"),
        ([("a", "a")], "cycle: a -> back"),
        ([("x", "a"), ("a", "b"), ("b", "a"), ("b", "y")], "cycle: a -> b -> back"),
    ],
)
def test_cycles_are_named(edges, match):
    with pytest.raises(InvalidGraph, match=match):
        from_networkx(nx.DiGraph(edges))


def test_a_cycle_of_soft_edges_is_a_cycle():
    dag = nx.DiGraph()
    dag.add_edge("a", "b", soft=True)
    dag.add_edge("b", "a", soft=True)
    with pytest.raises(InvalidGraph, match="cycle"):
        from_networkx(dag)


@pytest.mark.parametrize("kind", [nx.Graph, nx.MultiDiGraph, nx.MultiGraph])
def test_only_simple_directed_graphs(kind):
    with pytest.raises(InvalidGraph, match=f"not a {kind.__name__}"):
        from_networkx(kind([("a", "b")]))


def test_names_must_differ_as_strings():
    with pytest.raises(InvalidGraph, match="two nodes have the same"):
        from_networkx(nx.DiGraph([(1, "1")]))


def test_a_damaged_bipartite_graph_is_refused(diamond):
    for node, attribute in [(("op", "A"), "time"), (("value", "a"), "kind")]:
        dag = to_networkx(diamond)
        del dag.nodes[node][attribute]
        with pytest.raises(InvalidGraph, match=f"lacks the attribute '{attribute}'"):
            from_networkx(dag)
    dag = to_networkx(diamond)
    dag.remove_node(("op", "B"))
    with pytest.raises(InvalidGraph):
        from_networkx(dag)


def test_the_empty_graph():
    assert from_networkx(nx.DiGraph()) == Graph((), ())
    assert from_networkx(to_networkx(Graph((), ()))) == Graph((), ())
