"""Hypothesis strategies for small graphs with everything that may go wrong in a bound."""

from __future__ import annotations

from hypothesis import strategies as st

from remat_graph import Graph, Op, Stage, Value

Pairs = tuple[tuple[str, str], ...]


@st.composite
def graphs(draw, most_ops: int = 8, most_values: int = 10, uneven: bool = False) -> Graph:
    """Draw a graph; `uneven` ones have values and workspace of very unequal size."""
    sizes = st.sampled_from([0, 1, 2, 10, 20, 50, 95]) if uneven else st.integers(0, 6)
    workspaces = [0, 0, 10, 100, 300] if uneven else [0, 0, 1, 4]
    count = draw(st.integers(2, most_ops))
    values = [Value("x", 5)]
    ops: list[Op] = []
    made: list[str] = []
    boundary = draw(st.none() | st.integers(1, count - 1))
    for i in range(count):
        room = most_values - len(made) - (count - i - 1)
        outputs = draw(st.integers(1, max(1, min(2, room))))
        names = tuple(f"v{i}.{slot}" for slot in range(outputs))
        inputs = draw(st.lists(st.sampled_from(["x", *made]), max_size=3, unique=True))
        pairs = draw(_overwrites([v for v in inputs if v != "x"], names))
        size = {value.name: value.size_bytes for value in values}
        place = {name: size[read] for read, name in pairs}
        values += [Value(name, place.get(name, draw(sizes))) for name in names]
        after = draw(st.lists(st.sampled_from(ops), max_size=1)) if ops else []
        ops.append(
            Op(
                name=f"op{i}",
                inputs=tuple(inputs),
                outputs=names,
                time=float(draw(st.integers(0, 9))),
                workspace_bytes=draw(st.sampled_from(workspaces)),
                stage=Stage.FORWARD if boundary is None or i < boundary else Stage.BACKWARD,
                replayable=draw(st.sampled_from([True, True, True, True, False])),
                order_after=tuple(op.name for op in after),
                overwrites=pairs,
            )
        )
        made.extend(names)
    results = draw(st.lists(st.sampled_from(made), max_size=3, unique=True))
    return Graph(
        tuple(values),
        tuple(ops),
        frozenset({"x"}),
        frozenset({*results, made[-1]}),
        None if boundary is None else f"op{boundary}",
    )


def _overwrites(inputs: list[str], outputs: tuple[str, ...]) -> st.SearchStrategy[Pairs]:
    pairs = tuple(zip(inputs, outputs, strict=False))
    return st.sampled_from([(), pairs, pairs[:1]])


@st.composite
def trainings(draw, most_depth: int = 4) -> Graph:
    """A chain forward and its mirror backward: the shape on which recomputation pays."""
    depth = draw(st.integers(2, most_depth))
    sizes = [draw(st.integers(1, 5)) for _ in range(depth)]
    times = [float(draw(st.integers(1, 9))) for _ in range(depth)]
    values = [Value("x", 1)]
    ops: list[Op] = []
    before = "x"
    for i in range(depth):
        pairs: Pairs = ()
        if i and draw(st.booleans()):
            sizes[i] = sizes[i - 1]
            pairs = ((before, f"a{i}"),)
        values.append(Value(f"a{i}", sizes[i]))
        ops.append(Op(f"f{i}", (before,), (f"a{i}",), times[i], overwrites=pairs))
        before = f"a{i}"
    grad = before
    results = set()
    for i in reversed(range(depth)):
        values.append(Value(f"g{i}", sizes[i]))
        read = (f"a{i}", grad) if grad != f"a{i}" else (grad,)
        made = (f"g{i}",)
        if draw(st.booleans()):
            values.append(Value(f"w{i}", draw(st.integers(0, 2))))
            results.add(f"w{i}")
            made = (*made, f"w{i}")
        workspace = draw(st.sampled_from([0, 2]))
        same = {v.name: v.size_bytes for v in values}[read[-1]] == sizes[i] and draw(st.booleans())
        pairs = ((read[-1], f"g{i}"),) if same else ()
        ops.append(
            Op(f"b{i}", read, made, times[i], workspace, Stage.BACKWARD, f"f{i}", overwrites=pairs)
        )
        grad = f"g{i}"
    return Graph(
        tuple(values),
        tuple(ops),
        frozenset({"x"}),
        frozenset({grad, *results}),
        f"b{depth - 1}",
    )
