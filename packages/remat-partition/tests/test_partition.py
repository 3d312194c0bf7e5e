from pathlib import Path

import pytest

import remat_partition
from remat_graph import Block, Graph, Hierarchy, Op, Value
from remat_partition import BrokenPartitioner, Partitioner, PartitionError, partition

GRAPH = Graph(
    tuple(Value(v, 1) for v in "abc"),
    (
        Op("A", (), ("a",), 1.0),
        Op("B", ("a",), ("b",), 1.0),
        Op("C", ("b",), ("c",), 1.0),
    ),
)
FLAT = Block("root", ("A", "B", "C"))


class Returns:
    """A partitioner that answers with what `answer` makes of the graph."""

    name = "returns"

    def __init__(self, answer):
        self.answer = answer

    def partition(self, graph):
        return self.answer(graph)


def test_what_is_valid_comes_back():
    nested = Block("root", (Block("x", ("A", "B")), "C"))
    for root in (FLAT, nested):
        found = partition(GRAPH, partitioner=Returns(lambda g, root=root: Hierarchy(g, root)))
        assert found == Hierarchy(GRAPH, root)


def test_an_equal_graph_is_this_graph():
    twin = Graph(GRAPH.values, GRAPH.ops)
    assert partition(twin, partitioner=Returns(lambda _: Hierarchy(GRAPH, FLAT))).graph == twin


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (lambda _: None, "returned a NoneType, no Hierarchy"),
        (lambda _: FLAT, "returned a Block, no Hierarchy"),
        (lambda _: Hierarchy(Graph(GRAPH.values[:1], GRAPH.ops[:1]), Block("root", ("A",))),
         "a hierarchy of another graph"),
        (lambda g: Hierarchy(g, Block("root", ("A", "B"))), "InvalidGraph: op 'C' is in no block"),
        (lambda g: Hierarchy(g, Block("root", (Block("x", ("A", "C")), "B"))),
         "InvalidGraph: op 'C' comes after 'B'"),
        (lambda _: 1 // 0, "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_what_is_not_is_refused(answer, match):
    with pytest.raises(BrokenPartitioner, match=match) as caught:
        partition(GRAPH, partitioner=Returns(answer))
    assert caught.value.name == "returns"
    assert caught.value.origin.endswith("Returns")


def test_a_refusal_passes_through():
    def refuse(_):
        raise PartitionError("too small to cut")

    with pytest.raises(PartitionError, match=r"^too small to cut$") as caught:
        partition(GRAPH, partitioner=Returns(refuse))
    assert not isinstance(caught.value, BrokenPartitioner)


def test_the_protocol_is_what_the_tests_implement():
    assert isinstance(Returns(None), Partitioner)
    assert not isinstance(object(), Partitioner)


def test_errors_are_value_errors():
    errors = [getattr(remat_partition, name) for name in remat_partition.__all__]
    errors = [e for e in errors if isinstance(e, type) and issubclass(e, Exception)]
    assert len(errors) == 6
    assert all(issubclass(e, PartitionError) and issubclass(e, ValueError) for e in errors)


def examples():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    return [part.split("```")[0] for part in readme.split("```python")[1:]]


def test_the_example_of_a_networkx_dag(capsys):
    use, _ = examples()
    exec(use, {})
    said = [line.removeprefix("# ") for line in use.splitlines() if line.startswith("# ")]
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 5


def test_the_example_of_a_partitioner():
    scope = {}
    exec(examples()[1], scope)
    assert partition(GRAPH, partitioner=scope["Flat"]()).root == FLAT
