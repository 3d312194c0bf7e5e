import copy
import math
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import (
    Block,
    Graph,
    GraphError,
    Hierarchy,
    InvalidGraph,
    Numerics,
    Op,
    Stage,
    Value,
)

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


PACKED = Value("a@packed", 1)
PACK = Op("pack", ("a",), ("a@packed",), 0.1, optional=True)
UNPACK = Op("unpack", ("a@packed",), ("a",), 0.1, alternative_of="make_a")


def packing(**changed):
    """A chain whose first value can be kept packed; `changed` is what unpacking has of its own."""
    unpack = replace(UNPACK, **changed)
    return Graph((A, B, PACKED), (MAKE_A, PACK, unpack, MAKE_B), results=frozenset("b"))


def test_a_value_has_several_makers():
    graph = packing()
    assert graph.makers["a"] == (0, 2)
    assert graph.producer["a"] == 0
    assert graph.has_alternatives
    assert graph.time == 2.0
    assert graph.least_time is None
    assert graph.without_alternatives().least_time == 2.0
    owed = graph.without_alternatives()
    assert owed == Graph((A, B), (MAKE_A, MAKE_B), results=frozenset("b"))
    assert owed.without_alternatives() is owed


def test_what_is_less_exact_is_left_out_with_what_only_it_makes():
    graph = packing(numerics=Numerics.LOSSY)
    assert graph.with_numerics(Numerics.LOSSY) is graph
    for wanted in (Numerics.BITWISE, Numerics.ROUNDING):
        assert [op.name for op in graph.with_numerics(wanted).ops] == ["make_a", "pack", "make_b"]
    lossy = replace(graph, ops=(MAKE_A, replace(PACK, numerics=Numerics.LOSSY), UNPACK, MAKE_B))
    assert [op.name for op in lossy.with_numerics(Numerics.ROUNDING).ops] == ["make_a", "make_b"]


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"alternative_of": None}, "made by both 'make_a' and 'unpack', which is no alternative"),
        ({"alternative_of": "make_b"}, "made by both"),
        ({"alternative_of": "pack", "outputs": ("a@packed",), "inputs": ("a",)}, "which is owed"),
        ({"optional": True}, "cannot be optional itself"),
        ({"outputs": ()}, "it must make some of these and nothing else"),
    ],
)
def test_an_alternative_that_makes_no_sense_is_refused(changed, match):
    with refused(match):
        packing(**changed)


def test_nothing_owed_needs_what_is_optional():
    reader = replace(MAKE_B, inputs=("a@packed",))
    with refused("'make_b' is owed, but reads 'a@packed'"):
        Graph((A, B, PACKED), (MAKE_A, PACK, UNPACK, reader), results=frozenset("b"))
    with refused("'a@packed' is a result"):
        replace(packing(), results=frozenset({"b", "a@packed"}))
    once = replace(MAKE_A, replayable=False)
    with refused("'unpack' may run again, but 'make_a'"):
        Graph((A, B, PACKED), (once, PACK, UNPACK, MAKE_B), results=frozenset("b"))


def test_a_hierarchy_is_of_what_is_owed():
    with refused("without_alternatives"):
        Hierarchy(packing(), Block("root", ("make_a", "pack", "unpack", "make_b")))
