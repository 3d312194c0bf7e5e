import itertools
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from remat_graph import (
    Block,
    Compute,
    Free,
    Graph,
    Hierarchy,
    InvalidGraph,
    InvalidSchedule,
    Op,
    Schedule,
    Stage,
    Value,
    simulate,
)


class Tiles:
    """A cell repeated in a chain: forward ones first to last, backward ones last to first.

    Each cell reads what the cell before it made and the gradient that the cell after it made, has
    a parameter of its own, and is named by `rename(cell, name)`.
    """

    def __init__(self, cell, count, rename):
        self.cell, self.count, self.rename = cell, count, rename

    def graph(self):
        names = [self.names(i) for i in range(self.count)]
        values = [Value("first", 3), Value("end", 1), Value("last", 3)]
        ops = [Op("make", (), ("first",), 1.0)]
        for i in range(self.count):
            values += [Value(names[i][v.name], v.size_bytes) for v in self.cell.values
                       if v.name not in ("in", "grad")]  # fmt: skip
            ops += self.half(names[i], Stage.FORWARD)
        ops.append(Op("finish", (names[-1]["out"],), ("end",), 1.0))
        ops.append(Op("loss", ("end",), ("last",), 0.5, stage=Stage.BACKWARD))
        for i in reversed(range(self.count)):
            ops += self.half(names[i], Stage.BACKWARD)
        dropped = Op("drop", (names[0]["leave"],), (), 1.0, stage=Stage.BACKWARD, twin="make")
        resident = frozenset(name[v] for name in names for v in self.cell.resident
                             if v not in ("in", "grad"))  # fmt: skip
        return Graph(tuple(values), (*ops, dropped), resident, frozenset(), "loss")

    def half(self, names, stage):
        return [
            replace(
                op,
                name=names[op.name],
                inputs=tuple(names[v] for v in op.inputs),
                outputs=tuple(names[v] for v in op.outputs),
                twin=None if op.twin is None else names[op.twin],
                order_after=tuple(names[name] for name in op.order_after),
                overwrites=tuple((names[v], names[w]) for v, w in op.overwrites),
            )
            for op in self.cell.ops
            if op.stage is stage
        ]

    def names(self, i):
        known = {v.name: self.rename(i, v.name) for v in self.cell.values}
        known |= {op.name: self.rename(i, op.name) for op in self.cell.ops}
        known["in"] = "first" if i == 0 else self.rename(i - 1, "out")
        known["grad"] = "last" if i == self.count - 1 else self.rename(i + 1, "leave")
        return known

    def hierarchy(self):
        forward = [op.name for op in self.cell.ops if op.stage is Stage.FORWARD]
        blocks = [
            Block(f"block{i}", tuple(self.rename(i, name) for name in forward))
            for i in range(self.count)
        ]
        return Hierarchy(self.graph(), Block("root", ("make", *blocks, "finish")))


@st.composite
def cells(draw, graphs, max_ops=5):
    """A random graph that turns `in` into `out` and `grad` into `leave`."""
    inner = draw(graphs(max_ops=max_ops))
    first = inner.boundary_index
    forward = [v for v, i in inner.producer.items() if i < first]
    backward = [v for v, i in inner.producer.items() if i >= first]
    ops = [
        Op("enter", ("in",), ("entered",), 1.0, draw(st.integers(0, 2))),
        *inner.ops[:first],
        Op("exit", ("entered", *forward[-2:]), ("out",), 2.0),
        Op("back", ("grad", "out"), ("dout",), 1.0, stage=Stage.BACKWARD, twin="exit"),
        *inner.ops[first:],
        Op("leave_", ("dout", *backward[-2:]), ("leave",), 1.0, stage=Stage.BACKWARD, twin="enter"),
    ]
    sizes = {"in": 3, "entered": 2, "out": 3, "grad": 3, "dout": 1, "leave": 3}
    values = (*inner.values, *(Value(name, size) for name, size in sizes.items()))
    return Graph(values, tuple(ops), inner.resident | {"in", "grad"}, frozenset(), "back")


def renamers(data):
    salt = data.draw(st.text(min_size=1, max_size=3))
    return data.draw(
        st.sampled_from([lambda i, name: f"{name}_{salt}{i}", lambda i, name: f"{i}{salt}{name}"])
    )


def class_of(hierarchy, name):
    found = [u for u in hierarchy.unique_blocks if name in {m.name for m in u.members}]
    assert len(found) == 1
    return found[0]


def schedules(data, graph):
    """Draw a legal schedule: frees anywhere, and what is missing made again when it is needed."""
    steps, alive = [], set(graph.resident)

    def compute(op):
        for v in op.inputs:
            if v not in alive:
                compute(graph.ops[graph.producer[v]])
        steps.append(Compute(op.name))
        alive.update(op.outputs)

    for op in graph.ops:
        compute(op)
        freeable = sorted(
            v for v in alive - graph.resident if graph.ops[graph.producer[v]].replayable
        )
        if freeable:
            for v in data.draw(st.lists(st.sampled_from(freeable), max_size=2, unique=True)):
                alive.remove(v)
                steps.append(Free(v))
    for v in sorted(graph.results):
        if v not in alive:
            compute(graph.ops[graph.producer[v]])
    return Schedule(tuple(steps))


@given(data=st.data())
def test_repeated_blocks_are_one_class_and_schedules_translate(graphs, data):
    tiles = Tiles(data.draw(cells(graphs)), data.draw(st.integers(2, 4)), renamers(data))
    hierarchy = tiles.hierarchy()
    unique = class_of(hierarchy, "block0")
    assert [member.name for member in unique.members] == [f"block{i}" for i in range(tiles.count)]
    own = hierarchy.subgraph(unique.representative).graph
    schedule = schedules(data, own)
    expected = simulate(own, schedule)
    for i, member in enumerate(unique.members):
        translation = unique.translation(member)
        names = tiles.names(0), tiles.names(i)
        assert translation.ops == {
            names[0][op.name]: names[1][op.name]
            for op in tiles.cell.ops
            if names[0][op.name] in own.op_index  # some sit nowhere
        }
        translated = translation.schedule(schedule)
        assert simulate(hierarchy.subgraph(member).graph, translated) == expected


def like(hierarchy, one, two):
    """Whether some bijection of values, found by trying all, turns one subgraph into the other.

    Those that pair values of other sizes or roles need not be tried.
    """
    a, b = hierarchy.subgraph(one), hierarchy.subgraph(two)
    if len(a.graph.ops) != len(b.graph.ops):
        return False
    mine, theirs = values_by_kind(hierarchy.graph, a), values_by_kind(hierarchy.graph, b)
    if {k: len(v) for k, v in mine.items()} != {k: len(v) for k, v in theirs.items()}:
        return False
    op_names = dict(zip((o.name for o in a.graph.ops), (o.name for o in b.graph.ops), strict=True))
    orders = [itertools.permutations(theirs[kind]) for kind in mine]
    for order in itertools.product(*orders):
        rename = dict(zip(itertools.chain(*mine.values()), itertools.chain(*order), strict=True))
        pairs = zip(a.graph.ops, b.graph.ops, strict=True)
        if all(same_op(x, y, rename, op_names) for x, y in pairs):
            return True
    return False


def same_op(x, y, rename, op_names):
    moved = replace(
        x,
        name=op_names[x.name],
        inputs=tuple(rename[v] for v in x.inputs),
        outputs=tuple(rename[v] for v in x.outputs),
        twin=op_names.get(x.twin),
        order_after=y.order_after,
        overwrites=tuple((rename[v], rename[w]) for v, w in x.overwrites),
    )
    return moved == y and {op_names[o] for o in x.order_after} == set(y.order_after)


def values_by_kind(whole, sub):
    """The values of a subgraph by size, kind of maker, and kinds of readers outside."""
    kinds = {}
    inside = {op.name for op in sub.graph.ops}
    for value in sub.graph.values:
        v = value.name
        maker = whole.ops[whole.producer[v]] if v in whole.producer else None
        readers = [whole.ops[i] for i in whole.consumers[v]]
        if maker is None:
            kind = ("resident", v in whole.results)
        elif maker.name not in inside:
            kind = maker.stage
        else:
            outside = frozenset(op.stage for op in readers if op.name not in inside)
            kind = (outside, v in whole.results)
        kinds.setdefault((value.size_bytes, kind), []).append(v)
    return kinds


def perturbed(data, graph):
    """Change one thing somewhere."""
    i = data.draw(st.integers(0, len(graph.ops) - 1))
    op = graph.ops[i]
    v = data.draw(st.sampled_from([value.name for value in graph.values]))
    changes = {
        "nothing": {},
        "time": {"time": op.time + 1},
        "equivalence": {"equivalence": "other"},
        "inputs": {"inputs": op.inputs[::-1]},
        "outputs": {"outputs": op.outputs[::-1]},
        "fewer": {"inputs": op.inputs[1:]},
        "more": {"inputs": tuple(dict.fromkeys((*op.inputs, v)))},
        "twinless": {"twin": None},
        "size": None,
        "result": None,
    }
    what = data.draw(st.sampled_from(list(changes)))
    if what == "size":
        values = tuple(replace(x, size_bytes=9) if x.name == v else x for x in graph.values)
        ops = tuple(replace(op, overwrites=()) for op in graph.ops)
        return replace(graph, values=values, ops=ops)
    if what == "result":
        return replace(graph, results=graph.results | {v})
    try:
        ops = (*graph.ops[:i], replace(op, **changes[what]), *graph.ops[i + 1 :])
        return replace(graph, ops=ops)
    except InvalidGraph:  # it would read what is made later, or overwrite what it does not read
        reject()


@given(data=st.data())
def test_identity_is_isomorphism_by_trying_all(graphs, data):
    tiles = Tiles(data.draw(cells(graphs, 2)), 3, lambda i, name: f"{name}_{i}")
    hierarchy = tiles.hierarchy()
    hierarchy = Hierarchy(perturbed(data, hierarchy.graph), hierarchy.root)
    key = {m.name: u.hash for u in hierarchy.unique_blocks for m in u.members}
    for one, two in itertools.combinations(["block0", "block1", "block2"], 2):
        assert (key[one] == key[two]) == like(hierarchy, one, two)


def chain(**changed):
    """Three equal layers with a backward op each; `changed` is what op `f1` has of its own."""
    ops = [Op("f0", ("x", "w0"), ("h0",), 1.0)]
    ops += [Op(f"f{i}", (f"h{i - 1}", f"w{i}"), (f"h{i}",), 1.0, equivalence="linear")
            for i in range(1, 4)]  # fmt: skip
    ops[2] = replace(ops[2], **changed)
    ops.append(Op("loss", ("h3",), ("g3",), 1.0, stage=Stage.BACKWARD))
    ops += [Op(f"b{i}", (f"g{i}", f"h{i - 1}"), (f"g{i - 1}", f"d{i}"), 2.0, stage=Stage.BACKWARD,
               twin=f"f{i}") for i in (3, 2, 1)]  # fmt: skip
    ops.append(Op("b0", ("g0", "x"), ("d0",), 2.0, stage=Stage.BACKWARD, twin="f0"))
    names = ["x", *(f"{kind}{i}" for kind in "whgd" for i in range(4))]
    return Graph(
        tuple(Value(name, 4) for name in names),
        tuple(ops),
        frozenset({"x", *(f"w{i}" for i in range(4))}),
        frozenset({"h3", *(f"d{i}" for i in range(4))}),
        "loss",
    )


def classes(graph, *more):
    layers = tuple(Block(f"layer{i}", (f"f{i}",)) for i in range(1, 4))
    found = Hierarchy(graph, Block("root", ("f0", *layers, *more))).unique_blocks
    return [[member.name for member in unique.members] for unique in found]


def test_what_tells_blocks_apart():
    """The last layer's output is a result; else only what is given here differs."""
    assert classes(chain()) == [["layer1", "layer2"], ["layer3"], ["root"]]
    apart = [["layer1"], ["layer2"], ["layer3"], ["root"]]
    assert classes(chain(time=1.5)) == apart  # although declared equivalent
    assert classes(chain(workspace_bytes=1)) == apart
    assert classes(chain(equivalence="other")) == apart
    assert classes(chain(replayable=False)) == apart
    assert classes(chain(inputs=("w2", "h1"))) == apart
    assert classes(chain(inputs=("h1", "w2", "x"))) == apart
    assert classes(chain(order_after=("f1",))) == [["layer1", "layer2"], ["layer3"], ["root"]]
    graph = chain()
    larger = tuple(Value(v.name, 5) if v.name == "d2" else v for v in graph.values)
    assert classes(replace(graph, values=larger)) == apart
    assert classes(replace(graph, results=graph.results | {"h2"})) == apart
    extra = Op("extra", ("h1",), (), 1.0)
    extended = replace(graph, ops=(*graph.ops[:4], extra, *graph.ops[4:]))
    assert classes(extended, "extra") == [["layer1", "layer2"], ["layer3"], ["root"]]
    saved = replace(graph.ops[-1], inputs=("g0", "x", "h1"))
    extended = replace(graph, ops=(*graph.ops[:-1], saved))
    assert classes(extended) == [["layer1", "layer2"], ["layer3"], ["root"]]
    resident = replace(
        graph, ops=tuple(replace(op, inputs=("x", "w2")) if op.name == "f2" else op
                         for op in graph.ops)
    )  # fmt: skip
    assert classes(resident) == apart


def test_a_representative_comes_after_what_is_in_it_at_every_level():
    graph = chain()
    inner = [Block(f"inner{i}", (f"f{i}",)) for i in range(4)]
    outer = [Block("outer0", ("f0", inner[1])), Block("outer1", (inner[2], inner[3]))]
    hierarchy = Hierarchy(graph, Block("root", tuple(outer)))
    assert [u.representative.name for u in hierarchy.unique_blocks] == [
        "inner1", "outer0", "inner3", "outer1", "root"
    ]  # fmt: skip
    assert hierarchy.unique_blocks is hierarchy.unique_blocks
    alone = Hierarchy(graph, Block("root", (Block("around", (Block("in", ("f0",)), "f1")), "f2",
                                            Block("other", ("f3",)))))  # fmt: skip
    assert len(alone.unique_blocks) == 4
    nested = Hierarchy(graph, Block("root", ("f0", Block("a", (Block("b", ("f1",)),)),
                                             Block("c", ("f2",)), "f3")))  # fmt: skip
    assert [[m.name for m in u.members] for u in nested.unique_blocks] == [
        ["b", "a", "c"], ["root"]
    ]  # fmt: skip


def test_a_hash_is_the_same_in_another_process_and_another_graph():
    layers = tuple(Block(f"layer{i}", (f"f{i}",)) for i in range(1, 4))
    hierarchy = Hierarchy(chain(), Block("root", ("f0", *layers)))
    one = class_of(hierarchy, "layer1")
    again = pickle.loads(pickle.dumps(hierarchy)).unique_blocks
    assert again == hierarchy.unique_blocks
    assert pickle.loads(pickle.dumps(one)).translation("layer2") == one.translation("layer2")
    assert one.hash == "ea1893b763a3ca99ee3803a16a349b848c1838ec56e0eb3c299f20c7b7d91cea"


def test_what_does_not_translate():
    layers = tuple(Block(f"layer{i}", (f"f{i}",)) for i in range(1, 4))
    unique = class_of(Hierarchy(chain(), Block("root", ("f0", *layers))), "layer1")
    with pytest.raises(InvalidGraph, match=r"'layer3' is not identical to 'layer1'; .* 'layer2'"):
        unique.translation("layer3")
    translation = unique.translation("layer2")
    schedule = Schedule((Compute("f1"), Free("h1"), Compute("b1")))
    assert translation.schedule(schedule) == Schedule((Compute("f2"), Free("h2"), Compute("b2")))
    for step, name in ((Compute("f2"), "f2"), (Free("w3"), "w3")):
        with pytest.raises(InvalidSchedule, match=f"step 1: names '{name}'"):
            translation.schedule(Schedule((Compute("f1"), step)))
