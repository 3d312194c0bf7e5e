"""A chain of unit ops whose backward op i reads the input of step i, as revolve assumes."""

from remat_graph import Graph, Op, Stage, Value


def unit_chain(steps: int, twins: bool = True) -> Graph:
    values, ops = [Value("x", 1)], []
    states = ["x", *(f"a{i}" for i in range(steps))]
    for i in range(steps):
        values.append(Value(states[i + 1], 1))
        ops.append(Op(f"f{i}", (states[i],), (states[i + 1],), 1.0))
    values.append(Value("seed", 0))
    ops.append(Op("loss", (states[steps],), ("seed",), 0.0, stage=Stage.BACKWARD))
    grad = "seed"
    for i in reversed(range(steps)):
        values.append(Value(f"g{i}", 0))
        twin = f"f{i}" if twins else None
        read = (states[i], grad)
        ops.append(Op(f"b{i}", read, (f"g{i}",), 1.0, stage=Stage.BACKWARD, twin=twin))
        grad = f"g{i}"
    return Graph(tuple(values), tuple(ops), frozenset({"x"}), frozenset({grad}), "loss")
