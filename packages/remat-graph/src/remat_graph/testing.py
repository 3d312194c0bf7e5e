"""Small training graphs to try solvers and partitioners on: known ones, and random ones."""

from __future__ import annotations

from random import Random

from remat_graph import Block, Graph, Hierarchy, Op, Stage, Value

__all__ = ["in_blocks", "random_dag", "random_training", "unit_chain", "with_mask"]


def unit_chain(steps: int, twins: bool = True) -> Graph:
    """Chain unit ops; the backward op of a step reads the input of the step, as revolve assumes."""
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


def with_mask(steps: int) -> Graph:
    """Give each step of a chain a mask, packed, which its backward op may read in its place."""
    chain = unit_chain(steps)
    values = [Value(v.name, 8 * v.size_bytes) for v in chain.values]
    ops: list[Op] = []
    for op in chain.ops:
        ops.append(op)
        if op.stage is Stage.FORWARD:
            read, mask = op.inputs[0], f"{op.inputs[0]}@mask"
            values.append(Value(mask, 1))
            ops.append(Op(f"pack {read}", (read,), (mask,), 0.5, optional=True))
        elif op.twin is not None:
            masked = (f"{op.inputs[0]}@mask", op.inputs[1])
            again = Op(
                f"{op.name} by mask", masked, op.outputs, 1.0, stage=Stage.BACKWARD, twin=op.twin,
                alternative_of=op.name,
            )  # fmt: skip
            ops.append(again)
    return Graph(tuple(values), tuple(ops), chain.resident, chain.results, chain.boundary)


def random_training(random: Random, most_depth: int = 4) -> Graph:
    """Make a chain forward and its mirror backward, with skips, workspace and parameter gradients.

    Some ops run once only, overwrite what they read, take no time, or make nothing that counts.
    """
    depth = random.randint(2, most_depth)
    values = [Value("x", 5)]
    ops: list[Op] = []
    before = "x"
    for i in range(depth):
        size = random.randint(0, 6)
        skips = [op.outputs[0] for op in ops[:-1] if random.random() < 0.2]
        overwrites = before != "x" and random.random() < 0.2
        if overwrites:
            size = values[-1].size_bytes
        values.append(Value(f"a{i}", size))
        ops.append(
            Op(
                f"f{i}", (before, *skips), (f"a{i}",), float(random.randint(0, 9)),
                random.choice((0, 0, 4)), replayable=random.random() < 0.9,
                overwrites=((before, f"a{i}"),) if overwrites else (),
            )
        )  # fmt: skip
        before = f"a{i}"
    results = set()
    grad = before
    for i in reversed(range(depth)):
        outputs = [f"g{i}"] + [f"w{i}"] * (random.random() < 0.4)
        results |= set(outputs[1:])
        values += [Value(v, random.randint(0, 5)) for v in outputs]
        read = dict.fromkeys((f"a{i}", grad))
        ops.append(
            Op(
                f"b{i}", tuple(read), tuple(outputs), float(random.randint(0, 9)),
                random.choice((0, 2)), Stage.BACKWARD, f"f{i}",
            )
        )  # fmt: skip
        grad = f"g{i}"
    last = f"b{depth - 1}"
    return Graph(tuple(values), tuple(ops), frozenset({"x"}), frozenset({grad, *results}), last)


def random_dag(random: Random, most_ops: int = 7, most_values: int = 8) -> Graph:
    """Make a graph of any shape: ops with several outputs or none wanted, orders without data."""
    count = random.randint(1, most_ops)
    boundary = random.choice((None, *range(1, count)))
    values = [Value("x", 5)]
    ops: list[Op] = []
    computed: list[str] = []
    for i in range(count):
        room = most_values - len(computed) - (count - i - 1)
        names = tuple(f"v{i}.{slot}" for slot in range(random.randint(1, max(1, min(2, room)))))
        available = ["x", *computed]
        inputs = random.sample(available, random.randint(0, min(3, len(available))))
        backward = boundary is not None and i >= boundary
        ops.append(
            Op(
                f"op{i}", tuple(inputs), names,
                float(random.randint(0, 9)), random.choice((0, 0, 1, 4)),
                Stage.BACKWARD if backward else Stage.FORWARD, replayable=random.random() < 0.8,
                order_after=tuple(op.name for op in random.sample(ops, min(len(ops), i % 2))),
            )
        )  # fmt: skip
        values += [Value(name, random.randint(0, 6)) for name in names]
        computed += names
    results = {v for v in computed if random.random() < 0.2} | {computed[-1]}
    last = None if boundary is None else f"op{boundary}"
    return Graph(tuple(values), tuple(ops), frozenset({"x"}), frozenset(results), last)


def in_blocks(graph: Graph, most_members: int = 4) -> Hierarchy:
    """Cut the forward half into blocks of consecutive ops, these into blocks, up to the root."""
    members: list[str | Block] = [op.name for op in graph.ops[: graph.boundary_index]]
    level = 0
    while len(members) > most_members:
        starts = range(0, len(members), most_members)
        parts = [tuple(members[at : at + most_members]) for at in starts]
        members = [Block(f"block {level}.{number}", part) for number, part in enumerate(parts)]
        level += 1
    return Hierarchy(graph, Block("root", tuple(members)))
