"""What the benchmark of structure says of a cut, on a graph small enough to check by hand."""

import pytest

from cuts import Cut, lowest_groups, measure_cut, metis_groups, top_groups
from remat_graph import Block, Graph, Hierarchy, Op, Stage, Value


@pytest.fixture
def graph():
    """Two chains a -> b and c -> d that meet in e; d also comes after a; e has a backward op."""
    sizes = {"w": 1000, "a": 1, "b": 10, "c": 100, "d": 5, "e": 7, "g": 3}
    return Graph(
        tuple(Value(name, size) for name, size in sizes.items()),
        (
            Op("A", ("w",), ("a",), 1.0),
            Op("B", ("a", "w"), ("b",), 1.0),
            Op("C", ("w",), ("c",), 1.0),
            Op("D", ("c",), ("d",), 1.0, order_after=("A",)),
            Op("E", ("b", "d", "c"), ("e",), 1.0),
            Op("dE", ("a", "e"), ("g",), 1.0, stage=Stage.BACKWARD, twin="E"),
        ),
        frozenset("w"),
        frozenset("g"),
        "dE",
    )


def test_groups_of_a_hierarchy(graph):
    left = Block("left", ("A", Block("only", ("B",))))
    hierarchy = Hierarchy(graph, Block("root", (left, Block("right", ("C", "D")), "E")))
    top, lowest = top_groups(hierarchy), lowest_groups(hierarchy)
    assert [top.index(group) for group in top] == [0, 0, 2, 2, 4]
    assert [lowest.index(group) for group in lowest] == [0, 1, 2, 2, 4]
    assert measure_cut(graph, top) == Cut(groups=3, largest=2, size_bytes=115, circular=0)
    assert measure_cut(graph, lowest) == Cut(groups=4, largest=2, size_bytes=116, circular=0)


def test_groups_in_circles_are_counted(graph):
    assert measure_cut(graph, [0, 0, 1, 1, 1]).circular == 0  # D comes after A: one way
    assert measure_cut(graph, [0, 1, 1, 1, 0]) == Cut(2, 3, 116, 2)
    assert measure_cut(graph, [0, 0, 1, 1, 0]).circular == 2  # by that order alone
    assert measure_cut(graph, [0, 2, 1, 0, 1]).circular == 3


def test_metis_cuts_where_least_crosses(graph):
    groups = metis_groups(graph, 2)
    assert groups == metis_groups(graph, 2)
    assert groups[0] == groups[1] != groups[2] == groups[3] == groups[4]
