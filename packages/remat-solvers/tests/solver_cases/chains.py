"""Chains of stages, and the truth about rotor's class of schedules on them, by enumeration."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from remat_graph import Compute, Free, Graph, Op, Schedule, Stage, Value, simulate


def chain(stages: list[dict], resident_bytes: int = 1) -> Graph:
    """Write one op per stage and direction.

    Keys of a stage: size, grad, time, back, workspace, back_workspace, reads ("input", "output" or
    "both"), weight (bytes of a gradient that is a result, or None), result (of the forward value).
    """
    values = [Value("a-1", resident_bytes)]
    ops: list[Op] = []
    results = set()
    for i, stage in enumerate(stages):
        values.append(Value(f"a{i}", stage["size"]))
        ops.append(Op(f"f{i}", (f"a{i - 1}",), (f"a{i}",), stage["time"], stage["workspace"]))
        if stage["result"]:
            results.add(f"a{i}")
    grad = None
    for i, stage in reversed(list(enumerate(stages))):
        reads = {"input": [f"a{i - 1}"], "output": [f"a{i}"], "both": [f"a{i}", f"a{i - 1}"]}
        inputs = [*reads[stage["reads"]], *([grad] if grad else [])]
        grad = f"g{i}"
        made = [grad]
        values.append(Value(grad, stage["grad"]))
        if stage["weight"] is not None:
            values.append(Value(f"w{i}", stage["weight"]))
            results.add(f"w{i}")
            made.append(f"w{i}")
        ops.append(
            Op(
                f"b{i}",
                tuple(inputs),
                tuple(made),
                stage["back"],
                stage["back_workspace"],
                Stage.BACKWARD,
                f"f{i}",
            )
        )
    return Graph(
        tuple(values),
        tuple(ops),
        frozenset({"a-1"}),
        frozenset({*results, grad}),
        f"b{len(stages) - 1}",
    )


@st.composite
def chains(draw, most_stages: int = 5, results: bool = False) -> Graph:
    count = draw(st.integers(1, most_stages))
    few, times = st.integers(0, 6), st.integers(0, 9).map(float)
    return chain(
        [
            {
                "size": draw(few),
                "grad": draw(few),
                "time": draw(times),
                "back": draw(times),
                "workspace": draw(st.sampled_from([0, 0, 3])),
                "back_workspace": draw(st.sampled_from([0, 0, 3])),
                "reads": draw(st.sampled_from(["input", "output", "both"])),
                "weight": draw(st.none() | st.integers(0, 4)),
                "result": results and draw(st.booleans()),
            }
            for _ in range(count)
        ]
    )


def persistent_schedules(graph: Graph, s: int, t: int, *, first: bool = True) -> Iterator[list]:
    """Enumerate the sequences that run stages s..t forward and backward, by rotor's moves."""
    if s == t:
        reads = f"a{t}" in graph.ops[graph.op_index[f"b{t}"]].inputs
        yield [*([f"f{t}"] if first or reads else []), f"b{t}"]
        return
    for rest in persistent_schedules(graph, s + 1, t, first=first):
        yield [f"f{s}", *rest, f"b{s}"]
    for k in range(s + 1, t + 1):
        advance = [f"f{i}" for i in range(s, k)]
        for later in persistent_schedules(graph, k, t, first=first):
            for earlier in persistent_schedules(graph, s, k - 1, first=False):
                yield [*advance, *later, *earlier]


def with_frees(graph: Graph, order: list[str]) -> Schedule:
    """Free each value after the last read of each of its copies."""
    steps: list = []
    for i, name in enumerate(order):
        op = graph.ops[graph.op_index[name]]
        steps.append(Compute(name))
        for v in dict.fromkeys((*op.inputs, *op.outputs)):
            if v in graph.resident:
                continue
            for later in order[i + 1 :]:
                after = graph.ops[graph.op_index[later]]
                if v in after.inputs:
                    break
                if v in after.outputs:
                    steps.append(Free(v))
                    break
            else:
                if v not in graph.results:
                    steps.append(Free(v))
    return Schedule(tuple(steps))


def fastest_persistent(graph: Graph, budgets: list[int]) -> list[float | None]:
    """Find the least time of these sequences within each budget."""
    count = graph.boundary_index
    found = []
    for order in persistent_schedules(graph, 0, count - 1):
        timeline = simulate(graph, with_frees(graph, order))
        found.append((timeline.peak_bytes, timeline.time))
    return [min((t for p, t in found if p <= budget), default=None) for budget in budgets]
