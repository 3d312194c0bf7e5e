"""A step of several regions as one graph and its schedule, to be drawn as those of one region are.

The graph has the operations of every call, under names of their own. What is held outside of the
regions at a moment of the record is a value then, which an operation makes that takes no time: how
long the code between the regions runs is not known. What the simulator says of the schedule is what
the moments and the options of the calls add up to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from remat_graph import Compute, Free, Graph, Op, Schedule, Stage, Step, Value, freed_next
from remat_solvers.step import TimeStep

__all__ = ["WholeStep"]

_Half = tuple[int, Literal["forward", "backward"]]


@dataclass(frozen=True)
class WholeStep:
    """The moments of a recorded step, and the graph of each of its calls."""

    moments: tuple[TimeStep, ...]
    graphs: tuple[Graph, ...]

    @cached_property
    def graph(self) -> Graph:
        """All that runs: halves of calls in the order of the step, the forward ones first."""
        backward_from = next(
            (at for at, (_, half) in self._halves.items() if half == "backward"), len(self.moments)
        )
        ops: dict[Stage, list[Op]] = {Stage.FORWARD: [], Stage.BACKWARD: []}
        values: list[Value] = []
        for at, moment in enumerate(self.moments):
            stage = Stage.FORWARD if at < backward_from else Stage.BACKWARD
            ops[stage].append(Op(_outside(at), (), (_outside(at),), 0.0, stage=stage))
            values.append(Value(_outside(at), moment.fixed_bytes))
            for op in self._ops(at):
                ops[op.stage].append(op)
        resident = [
            Value(_of_call(name, call), graph.value_by_name[name].size_bytes)
            for call, graph in enumerate(self.graphs)
            for name in sorted(graph.resident)
        ]
        sizes = {
            _of_call(value.name, call): value.size_bytes
            for call, graph in enumerate(self.graphs)
            for value in graph.values
        }
        outputs = [name for op in ops[Stage.FORWARD] + ops[Stage.BACKWARD] for name in op.outputs]
        values += [Value(name, sizes[name]) for name in outputs if name in sizes]
        return Graph(
            values=(*resident, *values),
            ops=(*ops[Stage.FORWARD], *ops[Stage.BACKWARD]),
            resident=frozenset(value.name for value in resident),
            results=frozenset(),
            boundary=ops[Stage.BACKWARD][0].name if ops[Stage.BACKWARD] else None,
        )

    def schedule(self, schedules: Sequence[Schedule]) -> Schedule:
        """Put those of the calls together; what a call leaves is held outside of it after that."""
        steps: list[Step] = []
        alive: dict[int, set[str]] = {}

        def add(call: int, step: Step) -> None:
            graph, held = self.graphs[call], alive.setdefault(call, set())
            if isinstance(step, Free):
                held.remove(step.value)
                steps.append(Free(_of_call(step.value, call)))
            else:
                held.update(graph.ops[graph.op_index[step.op]].outputs)
                steps.append(Compute(_of_call(step.op, call)))

        for at in range(len(self.moments)):
            if at in self._halves:
                call, half = self._halves[at]
                let_go, of_half = _steps_of(self.graphs[call], schedules[call], half)
                for step in let_go:
                    add(call, step)
            steps.append(Compute(_outside(at)))
            if at in self._halves:
                for step in of_half:
                    add(call, step)
                if half == "backward":
                    steps += [Free(_of_call(value, call)) for value in sorted(alive.pop(call))]
            steps.append(Free(_outside(at)))
        for call, left in alive.items():
            steps += [Free(_of_call(value, call)) for value in sorted(left)]
        return Schedule(tuple(steps))

    @cached_property
    def _halves(self) -> dict[int, _Half]:
        """Which half of which call runs, by moment: each once, the forward one before."""
        halves: dict[int, _Half] = {}
        seen: set[_Half] = set()
        for at, moment in enumerate(self.moments):
            half = moment.running
            if half is None or half in seen:
                continue
            if half[1] == "forward" or (half[0], "forward") in seen:
                seen.add(half)
                halves[at] = half
        return halves

    def _ops(self, at: int) -> Iterator[Op]:
        """List the operations of the half that runs at a moment, as those of its call."""
        if at not in self._halves:
            return
        call, half = self._halves[at]
        graph = self.graphs[call]
        first = graph.boundary_index

        def of_call(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(_of_call(name, call) for name in names)

        for op in graph.ops[:first] if half == "forward" else graph.ops[first:]:
            yield replace(
                op,
                name=_of_call(op.name, call),
                # The one at the boundary stands for the code between the halves.
                inputs=() if op.name == graph.boundary else of_call(op.inputs),
                outputs=of_call(op.outputs),
                workspace_bytes=0 if op.name == graph.boundary else op.workspace_bytes,
                twin=None,
                order_after=(),
                overwrites=tuple(
                    (_of_call(read, call), _of_call(new, call))
                    for read, new in op.overwrites
                    if read not in graph.results  # they are freed here, and are not there
                ),
            )


def _steps_of(
    graph: Graph, schedule: Schedule, half: Literal["forward", "backward"]
) -> tuple[Sequence[Step], Sequence[Step]]:
    """Give the steps of a half; before them what frees that which is gone when it begins."""
    assert graph.boundary is not None
    at = schedule.steps.index(Compute(graph.boundary))
    if half == "forward":
        return (), schedule.steps[:at]
    made, freed = graph.ops[graph.boundary_index].outputs, freed_next(schedule.steps, at)
    let_go = [Free(value) for value in sorted(freed.difference(made))]
    begins = at + 1 + len(freed)
    unused = (step for step in schedule.steps[at:begins] if step not in let_go)
    return let_go, (*unused, *schedule.steps[begins:])


def _of_call(name: str, call: int) -> str:
    return f"{name}, call {call + 1}"


def _outside(moment: int) -> str:
    return f"outside of the regions, moment {moment + 1}"
