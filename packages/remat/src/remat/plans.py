"""What a plan promises: of one graph, and of a step of several regions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from remat.errors import RematError
from remat_graph import Compute, Graph, Schedule, Solution, Stage
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
    run. `source` is the generated code.
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
        """The least overhead of any schedule in this order, if proved."""
        if self.solution.lower_bound is None or not self.graph.time:
            return None
        return max(0.0, self.solution.lower_bound / self.graph.time - 1)

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
    that ran by this plan, `None` before. No plan of the regions within the budget takes less time
    than `lower_bound`.
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


def _recomputed(schedule: Schedule) -> int:
    computed = [step.op for step in schedule if isinstance(step, Compute)]
    return len(computed) - len(set(computed))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _or_dash(size: int | None) -> str:
    return "not measured" if size is None else _mib(size)


def _times(count: int) -> str:
    return f"{count} times " if count > 1 else ""
