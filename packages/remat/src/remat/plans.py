"""What a plan promises: of one graph, and of a step of several regions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from remat.errors import RematError
from remat.origin import Origin
from remat.plan_file import encode_plan, read_plan
from remat_graph import Compute, Graph, Numerics, Schedule, Solution, Stage, Status, simulate
from remat_graph.files import write_atomically
from remat_solvers.baselines.store_all import store_all
from remat_solvers.step import RegionOption

__all__ = ["Plan", "StepPlan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for one training graph, and what is known about it.

    Sizes in bytes, times in seconds by the costs of the graph. `plain_peak_bytes` is plain
    autograd's measured peak, `None` if the budget is no fraction of it, or it did not fit.
    `predicted_peak_bytes` is the schedule's: each draw of random numbers is taken to save the state
    of its generator, and what a loss outside the module keeps is a value of the graph.
    `measured_peak_bytes` is the peak of one real run of the plan, `None` for a plan that was not
    run. `missing` are the positions of outputs whose gradients it takes not to come, `let_go` those
    of outputs that it takes the user to hold no more when the backward starts. `source` is the
    generated code; a plan that was read from a file has none.
    """

    graph: Graph
    solution: Solution
    budget_bytes: int
    plain_peak_bytes: int | None
    store_all_peak_bytes: int
    measured_peak_bytes: int | None
    capture_seconds: float
    predicted_peak_bytes: int
    source: str
    origin: Origin
    missing: frozenset[int] = frozenset()
    let_go: frozenset[int] = frozenset()

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, budget: int) -> Plan:
        """Make a plan of any schedule of a graph, such as another tool's, for a budget in bytes.

        Raises:
            InvalidSchedule: if it is no schedule of the graph.
        """
        timeline = simulate(graph, schedule)
        solution = Solution(
            Status.FEASIBLE,
            schedule,
            timeline.time,
            timeline.peak_bytes,
            graph.least_time,
            "given",
            0.0,
        )
        everything = simulate(graph, store_all(graph)).peak_bytes
        return cls(
            graph, solution, budget, None, everything, None, 0.0, timeline.peak_bytes, "",
            Origin.here(),
        )  # fmt: skip

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what `save` wrote.

        Raises:
            DocumentError: if the file is damaged, or holds something else.
            OSError: if it cannot be read.
        """
        return cls.decode(Path(path).read_bytes(), source=str(path))

    @classmethod
    def decode(cls, data: bytes, *, source: str = "document") -> Plan:
        """Read the bytes of a plan file; `source` names it in errors.

        Raises:
            DocumentError: if they are damaged, or of something else.
        """
        return cls(**read_plan(data, source=source))

    def encode(self) -> bytes:
        """Give the bytes of a plan file, without the generated code; equal plans, equal bytes."""
        return encode_plan(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, atomically, for `rematerialize(model, plan=path)`.

        Raises:
            OSError: if the folder does not exist or cannot be written.
        """
        write_atomically(path, self.encode())

    @property
    def schedule(self) -> Schedule:
        """The steps of the plan."""
        if self.solution.schedule is None:
            raise RematError("the plan has no schedule")
        return self.solution.schedule

    @property
    def predicted_overhead(self) -> float:
        """Time of recomputation as a fraction of computing everything once."""
        return self.solution.time / self.graph.time - 1 if self.graph.time else 0.0

    @property
    def bound_overhead(self) -> float | None:
        """The least overhead of any schedule in this order, if proved; it may be negative."""
        if self.solution.lower_bound is None or not self.graph.time:
            return None
        return self.solution.lower_bound / self.graph.time - 1

    @property
    def recomputations(self) -> int:
        """Number of operations run a second time or more."""
        return _recomputed(self.schedule)

    def __str__(self) -> str:
        """Say it readably."""
        forward = sum(op.stage is Stage.FORWARD for op in self.graph.ops)
        rows = [
            ("operations", f"{forward} forward, {len(self.graph.ops) - forward} backward, "
                           f"{self.recomputations} recomputed"),
            ("budget", _mib(self.budget_bytes)),
            ("peak, predicted", _mib(self.predicted_peak_bytes)),
            ("peak, measured", _or_dash(self.measured_peak_bytes)),
            ("plain autograd", _or_dash(self.plain_peak_bytes)),
            ("storing everything", _mib(self.store_all_peak_bytes)),
            ("overhead, predicted", f"{100 * self.predicted_overhead:.2f}%"),
            ("overhead, at least", "unknown" if self.bound_overhead is None
                                   else f"{100 * self.bound_overhead:.2f}%"),
            *(("made another way", text) for text in _other_ways(self.graph, self.schedule)),
            ("solver", f"{self.solution.solver} ({self.solution.status.value}), "
                       f"{self.solution.solve_seconds:.1f} s after {self.capture_seconds:.1f} s "
                       f"of capture"),
        ]  # fmt: skip
        return "\n".join(["remat plan", *(f"  {name:<20} {text}" for name, text in rows)])


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What was planned for a step of several regions; sizes in bytes, times in seconds.

    `regions` are pairs of a name and the option that it runs by, one for each call, in order.
    `breaks` say why the forward is not one region. `measured_peak_bytes` is that of the first step
    that ran by this plan, or the most of the first eight where there are other ranks; `None`
    before. No plan of the regions within the budget takes less time than `lower_bound`.
    """

    regions: tuple[tuple[str, RegionOption], ...]
    breaks: tuple[str, ...]
    budget_bytes: int
    predicted_peak_bytes: int
    store_all_peak_bytes: int
    time: float
    least_time: float
    lower_bound: float
    measured_peak_bytes: int | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Refuse: what runs between the regions is known only once a step was recorded.

        Raises:
            RematError: always.
        """
        raise RematError(
            f"cannot write {os.fspath(path)!r}: only the plan of a model that is one region can be "
            f"saved, and this one is of {len(self.regions)} calls of regions. What runs between "
            f"them is recorded in the first steps, so that it is planned again in each process"
        )

    @property
    def predicted_overhead(self) -> float:
        """Time of recomputation as a fraction of computing everything once."""
        return self.time / self.least_time - 1 if self.least_time else 0.0

    @property
    def bound_overhead(self) -> float:
        """The least overhead of any schedules of these regions, within the budget."""
        return max(0.0, self.lower_bound / self.least_time - 1) if self.least_time else 0.0

    @property
    def recomputations(self) -> int:
        """Number of operations run a second time or more."""
        return sum(_recomputed(option.schedule) for _, option in self.regions)

    def __str__(self) -> str:
        """Say it readably."""
        rows = [
            ("budget", _mib(self.budget_bytes)),
            ("peak, predicted", _mib(self.predicted_peak_bytes)),
            ("peak, measured", _or_dash(self.measured_peak_bytes)),
            ("storing everything", _mib(self.store_all_peak_bytes)),
            ("overhead, predicted", f"{100 * self.predicted_overhead:.2f}%"),
            ("overhead, at least", f"{100 * self.bound_overhead:.2f}%"),
            *(
                (name, f"{_times(count)}keeps {_mib(kept)}, peak {_mib(peak)}")
                for (name, kept, peak), count in Counter(
                    (name, option.kept_bytes, option.peak_bytes) for name, option in self.regions
                ).items()
            ),
            *(("break", reason) for reason in self.breaks),
        ]
        title = f"remat plan of {len(self.regions)} calls of regions"
        return "\n".join([title, *(f"  {name:<20} {text}" for name, text in rows)])


def _other_ways(graph: Graph, schedule: Schedule) -> Iterator[str]:
    """Say what runs by alternatives, what is kept packed, and how exact that is."""
    run = {graph.op_index[step.op] for step in schedule if isinstance(step, Compute)}
    ops = [graph.ops[index] for index in sorted(run)]
    chosen = [op for op in ops if not op.owed]
    if not chosen:
        return
    packed = [op for op in ops if op.optional]
    size = graph.value_by_name
    kept = sum(size[v].size_bytes for op in packed for v in op.outputs)
    least = max((op.numerics for op in chosen), key=list(Numerics).index)
    yield (
        f"{len(chosen) - len(packed)} operations, {len(packed)} values kept packed "
        f"({_mib(kept)}), {least.value}"
    )


def _recomputed(schedule: Schedule) -> int:
    computed = [step.op for step in schedule if isinstance(step, Compute)]
    return len(computed) - len(set(computed))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _or_dash(size: int | None) -> str:
    return "not measured" if size is None else _mib(size)


def _times(count: int) -> str:
    return f"{count} times " if count > 1 else ""
