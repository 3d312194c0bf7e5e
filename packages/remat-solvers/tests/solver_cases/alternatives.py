"""Small training graphs in which values have several makers, and their fastest schedules."""

from __future__ import annotations

import heapq
from dataclasses import replace

from hypothesis import strategies as st

from remat_graph import Graph, Op, Stage, Value
from solver_cases import brute_force
from solver_cases.brute_force import overwritten
from solver_cases.random_graphs import trainings

State = tuple[int, int, int]


def fastest(graph: Graph, budget_bytes: int) -> float | None:
    """Return the least time of a schedule of all groups in order, or `None` if nothing fits.

    Dijkstra over states: how many owed ops are done, what is alive, and which outputs of the next
    owed op were made. Only ops that are not optional may be non-replayable.
    """
    names = list(dict.fromkeys(v for op in graph.ops for v in op.outputs))
    bit = {v: 1 << i for i, v in enumerate(names)}
    size = {v: graph.value_by_name[v].size_bytes for v in names}
    owed = [op.name for op in graph.ops if op.owed]
    place = {name: at for at, name in enumerate(owed)}
    reads = [sum(bit[v] for v in op.inputs if v in bit) for op in graph.ops]
    makes = [sum(bit[v] for v in op.outputs) for op in graph.ops]
    made = [sum(size[v] for v in op.outputs) + op.workspace_bytes for op in graph.ops]
    owes = [makes[graph.op_index[name]] for name in owed]
    wanted = sum(bit[v] for v in graph.results if v in bit)
    start: State = (0, 0, 0)
    distance: dict[State, float] = {start: 0.0}
    heap = [(0.0, start)]
    while heap:
        time, state = heapq.heappop(heap)
        if time > distance[state]:
            continue
        done, alive, now = state
        if done == len(owed) and alive & wanted == wanted:
            return time
        weight = sum(size[v] for v in names if alive & bit[v])
        following = [((done, alive & ~bit[v], now), 0.0) for v in names if alive & bit[v]]
        for i, op in enumerate(graph.ops):
            at = -1 if op.optional else place[op.alternative_of or op.name]
            if at > done or reads[i] & ~alive:
                continue
            if not op.replayable and (at < done or now & makes[i]):
                continue
            after, which = done, now
            if at == done:
                which |= makes[i]
                if which == owes[done]:
                    after, which = done + 1, 0
            for over in overwritten(op):
                if weight + made[i] - sum(size[v] for v in over) <= budget_bytes:
                    left = alive & ~sum(bit[v] for v in over)
                    following.append(((after, left | makes[i], which), op.time))
        for new, cost in following:
            if time + cost < distance.get(new, float("inf")):
                distance[new] = time + cost
                heapq.heappush(heap, (time + cost, new))
    return None


def smallest(graph: Graph) -> int:
    """Return the least budget for which a schedule exists."""
    return brute_force.smallest(graph, fastest)


@st.composite
def trainings_with_alternatives(draw, most_depth: int = 3, most: int = 3) -> Graph:
    """Draw a chain and its mirror, with alternatives of the kinds that there are in practice.

    Two halves for a backward op, a copy that is packed and unpacked again, a backward op that reads
    the output in place of the input, or a packed copy, and a faster algorithm with a workspace.
    """
    graph = draw(trainings(most_depth))
    values, ops = list(graph.values), list(graph.ops)
    left = most
    for op in graph.ops:
        if left == 0:
            break
        kind = draw(st.sampled_from(_KINDS))
        if kind is not None:
            added = kind(draw, graph, op)
            at = ops.index(op) + 1
            values += added[0]
            ops[at:at] = added[1]
            left -= bool(added[1])
    once = {op.name for op in graph.ops if draw(st.integers(0, 5)) == 0}
    ops = [
        replace(op, replayable=False) if once & {op.name, op.alternative_of} else op for op in ops
    ]
    return replace(graph, values=tuple(values), ops=tuple(ops))


Added = tuple[list[Value], list[Op]]


def _halves(draw, graph: Graph, op: Op) -> Added:
    if len(op.outputs) < 2:
        return [], []
    halves = [
        _other(draw, op, f"{op.name}/{v}", outputs=(v,), inputs=op.inputs) for v in op.outputs
    ]
    return [], halves


def _packed(draw, graph: Graph, op: Op) -> Added:
    if op.stage is Stage.BACKWARD:
        return [], []
    v = op.outputs[0]
    copy = Value(f"{v}@packed", draw(st.integers(0, graph.value_by_name[v].size_bytes)))
    time = float(draw(st.integers(0, 2)))
    pack = Op(f"pack {v}", (v,), (copy.name,), time, optional=True)
    return [copy], [pack, _other(draw, op, f"unpack {v}", inputs=(copy.name,), outputs=(v,))]


def _by_output(draw, graph: Graph, op: Op) -> Added:
    if op.stage is Stage.FORWARD:
        return [], []
    others = [f"a{i}" for i in range(4) if f"a{i}" in graph.value_by_name]
    inputs = tuple(dict.fromkeys((draw(st.sampled_from(others)), *op.inputs[1:])))
    return [], [_other(draw, op, f"{op.name} by another", inputs=inputs, outputs=op.outputs)]


def _faster(draw, graph: Graph, op: Op) -> Added:
    more = draw(st.integers(0, 4))
    return [], [_other(draw, op, f"{op.name} fast", workspace_bytes=more)]


def _other(draw, op: Op, name: str, **changes) -> Op:
    """Another op that makes some of the same, of another time, whose overwriting is kept."""
    changed = replace(op, overwrites=(), **changes)
    pairs = tuple(
        (read, made)
        for read, made in op.overwrites
        if read in changed.inputs and made in changed.outputs
    )
    time = float(draw(st.integers(0, 9)))
    return replace(changed, name=name, alternative_of=op.name, time=time, overwrites=pairs)


def _by_packed(draw, graph: Graph, op: Op) -> Added:
    """What reads a packed copy in place of the value; the copy is made whenever it is wanted."""
    if op.stage is Stage.FORWARD or not op.inputs[0].startswith("a"):
        return [], []
    v = op.inputs[0]
    copy = Value(f"{v}@mask", draw(st.integers(0, graph.value_by_name[v].size_bytes)))
    time = float(draw(st.integers(0, 2)))
    pack = Op(f"mask {v}", (v,), (copy.name,), time, stage=Stage.BACKWARD, optional=True)
    other = _other(draw, op, f"{op.name} by mask", inputs=(copy.name, *op.inputs[1:]))
    return [copy], [pack, other]


_KINDS = [None, _halves, _packed, _by_output, _faster, _by_packed]
