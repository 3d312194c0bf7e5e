import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import Block, Graph, Hierarchy, InvalidGraph, Op, Stage, Value
from remat_graph.placement import backward_placement


def before(graph, name):
    """The ops on which one depends directly."""
    op = graph.ops[graph.op_index[name]]
    made = {graph.ops[graph.producer[v]].name for v in op.inputs if v in graph.producer}
    return made | set(op.order_after)


def placement(hierarchy):
    return backward_placement(hierarchy.graph, hierarchy.root.op_names())


@given(data=st.data())
def test_backward_halves_run_in_the_reverse_order(hierarchies, data):
    hierarchy = hierarchies(data)
    position = {name: i for i, name in enumerate(hierarchy.root.op_names())}
    place = placement(hierarchy)
    for op in hierarchy.graph.ops[hierarchy.graph.boundary_index :]:
        sources = [position[place[source]] for source in before(hierarchy.graph, op.name)
                   if source in place]  # fmt: skip
        if op.name in place:
            assert all(source >= position[place[op.name]] for source in sources)
        else:
            assert not sources


@given(data=st.data())
def test_backward_ops_sit_where_they_are_said_to(hierarchies, data):
    """By the definition: the earliest of twin and sources, else the latest reader, else nowhere."""
    hierarchy = hierarchies(data)
    graph = hierarchy.graph
    order = list(hierarchy.root.op_names())
    place = placement(hierarchy)
    backward = graph.ops[graph.boundary_index :]

    def grounded(name):
        """Whether a twin is among the op and the backward ops that it depends on."""
        op = graph.ops[graph.op_index[name]]
        own = op.stage is Stage.BACKWARD
        return own and (op.twin is not None or any(map(grounded, before(graph, name))))

    def places(names):
        return [order.index(place[name]) for name in names if name in place]

    for i, op in enumerate(backward):
        sources = places(before(graph, op.name))
        readers = places(o.name for o in backward if op.name in before(graph, o.name))
        own = [] if op.twin is None else [order.index(op.twin)]
        if not grounded(op.name):
            own = [max(readers)] if readers and i else []
        expected = min((*own, *sources), default=None)
        assert place.get(op.name) == (None if expected is None else order[expected])


def test_a_constant_sits_with_a_reader_that_another_source_places():
    """`sum` reads `zero` and `one`, of which `one` sits with the first op, through its twin."""
    ops = (
        Op("f", (), ("f",), 1.0),
        Op("loss", (), ("loss",), 1.0, stage=Stage.BACKWARD),
        Op("one", (), ("one",), 1.0, stage=Stage.BACKWARD),
        Op("zero", (), ("zero",), 1.0, stage=Stage.BACKWARD),
        Op("sum", ("one", "zero"), ("sum",), 1.0, stage=Stage.BACKWARD),
        Op("d", ("one",), ("d",), 1.0, stage=Stage.BACKWARD, twin="f"),
    )
    graph = Graph(tuple(Value(op.name, 1) for op in ops), ops, boundary="loss")
    assert backward_placement(graph, ["f"]) == dict.fromkeys(("one", "zero", "sum", "d"), "f")


@given(data=st.data())
def test_a_subgraph_is_what_it_says(hierarchies, data):
    hierarchy = hierarchies(data)
    whole = hierarchy.graph
    place = placement(hierarchy)
    for block in hierarchy.root.blocks():
        sub = hierarchy.subgraph(block)
        forward = set(block.op_names())
        inside = forward | {op for op, at in place.items() if at in forward}
        if block is hierarchy.root:
            inside = set(whole.op_index)
        assert [op.name for op in sub.graph.ops] == [o.name for o in whole.ops if o.name in inside]
        assert {op.name for op in sub.forward} == forward
        assert {op.name for op in sub.backward} == inside - forward
        roles = {name: set() for name in ("parameters", "inputs", "gradients_in", "saved",
                                          "outputs", "gradients_out")}  # fmt: skip
        needed = {}
        for value in whole.values:
            v = value.name
            maker = whole.ops[whole.producer[v]] if v in whole.producer else None
            readers = [whole.ops[i] for i in whole.consumers[v]]
            outside = [o for o in readers if o.name not in inside]
            if maker is None or maker.name not in inside:
                if any(o.name in inside for o in readers):
                    forward_made = maker is not None and maker.stage is Stage.FORWARD
                    role = "inputs" if forward_made else "gradients_in"
                    roles["parameters" if maker is None else role].add(v)
            elif outside or v in whole.results:
                is_output = maker.stage is Stage.FORWARD
                roles["outputs" if is_output else "gradients_out"].add(v)
                stages = {o.stage for o in outside}
                needed[v] = (
                    Stage.FORWARD in stages, Stage.BACKWARD in stages, v in whole.results
                )  # fmt: skip
            elif maker.stage is Stage.FORWARD and any(o.stage is Stage.BACKWARD for o in readers):
                roles["saved"].add(v)
        assert {role: set(getattr(sub, role)) for role in roles} == roles
        assert dict(zip((*sub.outputs, *sub.gradients_out), sub.readers, strict=True)) == needed
        assert sub.graph.resident == {*sub.parameters, *sub.inputs, *sub.gradients_in}
        given = whole.results & roles["parameters"]
        assert sub.graph.results == needed.keys() | given
        for op in sub.graph.ops:
            original = whole.ops[whole.op_index[op.name]]
            assert (op.inputs, op.outputs) == (original.inputs, original.outputs)
            assert op.twin == (original.twin if original.twin in inside else None)
            assert set(op.order_after) == set(original.order_after) & inside
        assert all(whole.value_by_name[v.name] == v for v in sub.graph.values)


@given(data=st.data())
def test_the_blocks_of_a_block_share_out_its_ops(hierarchies, data):
    hierarchy = hierarchies(data)
    place = placement(hierarchy)
    for block in hierarchy.root.blocks():
        if block is hierarchy.root:
            continue
        parts = []
        for member in block.members:
            if isinstance(member, Block):
                parts += [op.name for op in hierarchy.subgraph(member).graph.ops]
            else:
                parts += [member, *(op for op, at in place.items() if at == member)]
        assert sorted(parts) == sorted(op.name for op in hierarchy.subgraph(block).graph.ops)


def test_the_diamond(diamond):
    """Both readers of `a` in one block, the loss and its gradient in another."""
    hierarchy = Hierarchy(diamond, Block("root", ("A", Block("middle", ("B", "C")), "L")))
    sub = hierarchy.subgraph("middle")
    assert sub.graph == Graph(
        values=tuple(Value(n, s) for n, s in [("a", 4), ("b", 3), ("stats", 1), ("c", 2)]),
        ops=diamond.ops[1:3],
        resident=frozenset({"a"}),
        results=frozenset({"b", "stats", "c"}),
    )
    assert sub.inputs == ("a",)
    assert sub.outputs == ("b", "stats", "c")
    assert sub.readers == ((True, True, False), (False, True, False), (True, True, False))
    assert hierarchy.subgraph(hierarchy.root).graph == diamond
    assert hierarchy.subgraph(hierarchy.root).saved == ("a", "b", "stats", "c")


def backward(name, inputs, outputs, twin=None):
    return Op(name, inputs, outputs, 1.0, stage=Stage.BACKWARD, twin=twin)


def residual():
    """Two readers of x, y = f(x) and z = y + x, a loss outside, and the sum of x's gradients."""
    return Graph(
        values=tuple(Value(n, 1) for n in ["p", "x", "y", "z", "dz", "dy", "one", "sum", "dp"]),
        ops=(
            Op("X", ("p",), ("x",), 1.0),
            Op("F", ("x",), ("y",), 1.0),
            Op("ADD", ("x", "y"), ("z",), 1.0),
            backward("loss", ("z",), ("dz",)),
            backward("ones", (), ("one",)),
            backward("dF", ("dz", "x", "one"), ("dy",), twin="F"),
            backward("sum", ("dz", "dy"), ("sum",)),
            backward("dX", ("sum", "one"), ("dp",), twin="X"),
        ),
        resident=frozenset("p"),
        results=frozenset({"z", "dp"}),
        boundary="loss",
    )


def test_sums_sit_with_what_they_sum_constants_with_their_reader_and_the_loss_nowhere():
    graph = residual()
    assert backward_placement(graph, ["X", "F", "ADD"]) == {
        "ones": "F", "dF": "F", "sum": "F", "dX": "X"
    }  # fmt: skip
    layer = Hierarchy(graph, Block("root", ("X", Block("layer", ("F", "ADD"))))).subgraph("layer")
    assert [op.name for op in layer.backward] == ["ones", "dF", "sum"]
    assert (layer.inputs, layer.gradients_in) == (("x",), ("dz",))
    assert (layer.outputs, layer.gradients_out) == (("z",), ("one", "sum"))
    assert layer.saved == ()


def test_a_block_that_is_not_there(diamond):
    hierarchy = Hierarchy(diamond, Block("root", ("A", Block("x", ("B", "C")), "L")))
    with pytest.raises(InvalidGraph, match="no such block 'y'"):
        hierarchy.subgraph("y")
    with pytest.raises(InvalidGraph, match="no such block 'x'"):
        hierarchy.subgraph(Block("x", ("B",)))
    again = pickle.loads(pickle.dumps(hierarchy))
    assert again == hierarchy
    assert again.subgraph(Block("x", ("B", "C"))) == hierarchy.subgraph("x")
