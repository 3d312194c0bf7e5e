import copy
import math
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import Graph, GraphError, InvalidGraph, Op, Stage, Value

A, B, C = Value("a", 1), Value("b", 2), Value("c", 3)
MAKE_A = Op("make_a", (), ("a",), 1.0)
MAKE_B = Op("make_b", ("a",), ("b",), 1.0)
BACK = Op("back", ("b",), ("c",), 1.0, stage=Stage.BACKWARD, twin="make_b")


def refused(match):
    return pytest.raises(InvalidGraph, match=match)


def test_invalid_graph_is_a_value_error():
    assert issubclass(InvalidGraph, GraphError)
    assert issubclass(GraphError, ValueError)


@pytest.mark.parametrize(
    ("name", "size", "match"),
    [
        ("", 1, "not empty"),
        ("v", -1, "value 'v' has size_bytes=-1"),
        ("v", 1.0, r"size_bytes=1\.0; it must be an int"),
        ("v", "1", "size_bytes='1'"),
    ],
)
def test_value_refuses(name, size, match):
    with refused(match):
        Value(name, size)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": ""}, "not empty"),
        ({"time": -0.5}, "op 'op' has time=-0.5"),
        ({"time": math.nan}, "time=nan"),
        ({"time": math.inf}, "time=inf"),
        ({"time": 1e308}, "time=1e[+]308; it must be from 0 to 1e[+]100"),
        ({"workspace_bytes": -1}, "op 'op' has workspace_bytes=-1"),
        ({"workspace_bytes": 0.5}, "workspace_bytes=0.5"),
        ({"inputs": ("a", "b", "a")}, "twice in its inputs"),
        ({"outputs": ("a", "a")}, "twice in its outputs"),
    ],
)
def test_op_refuses(change, match):
    with refused(match):
        Op(**{"name": "op", "inputs": (), "outputs": (), "time": 0.0} | change)


def test_equal_times_look_alike():
    assert repr(Op("op", (), (), 1).time) == "1.0"
    assert repr(Op("op", (), (), -0.0).time) == "0.0"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"values": (A, A), "ops": (MAKE_A,)}, "two values are called 'a'"),
        ({"values": (A,), "ops": (MAKE_A, MAKE_A)}, "two ops are called 'make_a'"),
        ({"values": (B,), "ops": (MAKE_B,)}, "'make_b' reads 'a', which is no value"),
        ({"values": (A, B), "ops": (MAKE_B, MAKE_A)}, "'make_b' reads 'a' before any op"),
        (
            {"values": (A,), "ops": (Op("loop", ("a",), ("a",), 1.0),)},
            "'loop' reads 'a' before any op",
        ),
        ({"values": (), "ops": (MAKE_A,)}, "'make_a' makes 'a', which is no value"),
        (
            {"values": (A,), "ops": (MAKE_A, Op("again", (), ("a",), 1.0))},
            "'a' is made by both 'make_a' and 'again'",
        ),
        ({"values": (A,), "ops": (MAKE_A,), "resident": {"a"}}, "makes 'a', which is resident"),
        (
            {"values": (A,), "ops": (replace(MAKE_A, order_after=("make_a",)),)},
            "after 'make_a', which is not an earlier op",
        ),
        (
            {"values": (A,), "ops": (replace(MAKE_A, order_after=("zzz",)),)},
            "after 'zzz', which is not an earlier op",
        ),
        (
            {"values": (A, B), "ops": (replace(MAKE_A, order_after=("make_b",)), MAKE_B)},
            "after 'make_b', which is not an earlier op",
        ),
        ({"values": (A,), "ops": (MAKE_A,), "resident": {"z"}}, "'z' is declared resident"),
        ({"values": (A,), "ops": (MAKE_A,), "results": {"z"}}, "'z' is declared a result"),
        ({"values": (A, C), "ops": (MAKE_A,)}, "'c' is made by no op and is not resident"),
        ({"values": (A,), "ops": (MAKE_A,), "boundary": "zzz"}, "boundary 'zzz' is no op"),
        ({"values": (A, B, C), "ops": (MAKE_A, MAKE_B, BACK)}, "'back' at 2 is backward"),
        (
            {"values": (A, B), "ops": (MAKE_A, MAKE_B), "boundary": "make_b"},
            "'make_b' at 1 is forward",
        ),
        (
            {"values": (A, B), "ops": (MAKE_A, replace(MAKE_B, twin="make_a"))},
            "only a backward op has one",
        ),
        (
            {"values": (A, B, C), "ops": (MAKE_A, MAKE_B, replace(BACK, twin="zzz")),
             "boundary": "back"},
            "'back' has twin 'zzz'",
        ),
        (
            {"values": (A, B, C), "ops": (MAKE_A, MAKE_B, replace(BACK, twin="back")),
             "boundary": "back"},
            "must be a forward op",
        ),
    ],
)  # fmt: skip
def test_graph_refuses(fields, match):
    with refused(match):
        Graph(**fields)


def test_lookups(diamond):
    assert diamond.value_by_name["stats"] == Value("stats", 1)
    assert diamond.op_index["L"] == 3
    assert diamond.producer == {"a": 0, "b": 1, "stats": 1, "c": 2, "loss": 3, "db": 4, "dc": 4,
                                "dw": 5}  # fmt: skip
    assert diamond.consumers["w"] == (0, 5)
    assert diamond.consumers["a"] == (1, 2, 5)
    assert diamond.consumers["dw"] == ()
    assert diamond.boundary_index == 4
    assert diamond.time == 9.0
    assert Graph((A,), (MAKE_A,)).boundary_index == 1


def test_lookups_cannot_be_written(diamond):
    with pytest.raises(TypeError):
        diamond.op_index["L"] = 0  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        diamond.boundary = None


def test_sets_may_be_given_as_any_collection():
    graph = Graph((A, B), (MAKE_B,), resident=["a"], results={"b"})
    assert graph == Graph((A, B), (MAKE_B,), resident=frozenset("a"), results=frozenset("b"))


def test_the_empty_graph_is_a_graph():
    graph = Graph((), ())
    assert graph.boundary_index == 0
    assert graph.time == 0.0


@given(data=st.data())
def test_copies_are_equal_and_work(graphs, data):
    graph = data.draw(graphs())
    copies = [copy.copy(graph), copy.deepcopy(graph)]
    copies += [pickle.loads(pickle.dumps(graph, protocol)) for protocol in range(2, 6)]
    for other in copies:
        assert other == graph
        assert hash(other) == hash(graph)
        for lookup in ("value_by_name", "op_index", "producer", "consumers"):
            assert getattr(other, lookup) == getattr(graph, lookup)


def test_graphs_differ_by_every_field(diamond):
    others = [
        replace(diamond, values=(*diamond.values[1:], diamond.values[0])),
        replace(diamond, ops=(replace(diamond.ops[0], time=1.5), *diamond.ops[1:])),
        replace(diamond, results=frozenset({"loss"})),
        replace(diamond, values=(*diamond.values, Value("p", 1)), resident=frozenset("wp")),
    ]
    assert len({diamond, *others}) == 5
