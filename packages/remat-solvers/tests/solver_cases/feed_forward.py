"""Training graphs of feed-forward networks with unit costs, as in Kumar et al., section 4."""

from __future__ import annotations

from remat_graph import Graph, Op, Stage, Value


def feed_forward(depth: int) -> Graph:
    """Product and activation per layer; gradients of weights are applied at once (size 0)."""
    values = [Value("x", 1)]
    ops: list[Op] = []
    before = "x"
    for i in range(depth):
        values += [Value(f"z{i}", 1), Value(f"a{i}", 1)]
        ops += [
            Op(f"product{i}", (before,), (f"z{i}",), 1.0),
            Op(f"relu{i}", (f"z{i}",), (f"a{i}",), 1.0),
        ]
        before = f"a{i}"
    values += [Value("loss", 1), Value("seed", 1)]
    ops += [
        Op("loss", (before,), ("loss",), 1.0),
        Op("loss.back", (before,), ("seed",), 1.0, stage=Stage.BACKWARD, twin="loss"),
    ]
    grad = "seed"
    updates = []
    for i in reversed(range(depth)):
        values += [Value(f"gz{i}", 1), Value(f"update{i}", 0), Value(f"ga{i}", 1)]
        updates.append(f"update{i}")
        source = f"a{i - 1}" if i else "x"
        for name, inputs, made, twin in (
            (f"relu{i}.back", (grad, f"z{i}"), f"gz{i}", f"relu{i}"),
            (f"weight{i}.back", (f"gz{i}", source), f"update{i}", f"product{i}"),
            (f"product{i}.back", (f"gz{i}",), f"ga{i}", f"product{i}"),
        ):
            ops.append(Op(name, inputs, (made,), 1.0, stage=Stage.BACKWARD, twin=twin))
        grad = f"ga{i}"
    return Graph(
        tuple(values),
        tuple(ops),
        frozenset({"x"}),
        frozenset({"loss", *updates}),
        "loss.back",
    )
