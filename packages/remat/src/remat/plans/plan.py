"""What a plan of a training step promises, of one region or of several."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from remat.budgets.plain_step import Basis
from remat.plans.file import (
    CLOSE,
    PlanBody,
    check_moment,
    encode_body,
    read_body,
    read_region,
    write_region,
)
from remat.plans.origin import Origin
from remat.plans.regions import PlannedRegion, lone_front, lone_option, peak_of
from remat.plans.whole_step import WholeStep
from remat_graph import (
    Compute,
    DocumentError,
    Graph,
    GraphError,
    Numerics,
    Op,
    Schedule,
    Solution,
    Status,
    Trial,
    simulate,
    write_atomically,
)
from remat_solvers import SolverError, store_all
from remat_solvers.step import RegionOption, TimeStep, measure_option

__all__ = ["Plan", "least_exact", "run_of"]
# What a file has as a plan has it.
_AS_WRITTEN = frozenset(PlanBody.__struct_fields__) - {
    "kinds",
    "predicted_peak_bytes",
    "store_all_peak_bytes",
}


@dataclass(frozen=True)
class Plan:
    """What was planned for a training step; sizes in bytes, times in seconds by costs of graphs.

    `calls` are pairs of a name and a position in `kinds`, one for each call of a region, in order;
    regions of the same operations and sizes are of one kind. `chosen` is the position of the option
    of each call, among those of its kind. Where one region is all of the step, its graph says what
    is held: the loss outside the module, and what it keeps, are part of it. Otherwise `moments` are
    what a recorded step was like: what the code between the regions held while which calls were
    between their halves; and `breaks` say why the forward is not one region. `cuts` are names of
    regions, with positions of outputs at which they are cut into several. `set_aside_bytes` are
    kept free beside it, since steps by earlier plans took more.

    No plan within the budget takes less time than `lower_bound`, first computations in the order of
    the graphs; `None` if nothing is proved. `doubt`, `status`, `solver` and `trials` are as those
    of a `Solution`. `measured_peak_bytes` is that of the first real step, or of a rehearsal, by
    this plan, or the most of the first eight where there are other ranks; `None` before.
    `measured_curve` pairs the seconds of a rehearsal with the bytes that it held then, known on the
    CPU; files leave it out. `plain_peak_bytes` is what a fraction is of: the most that plain
    autograd takes for a step of those seen before. It is `None` if the budget is no fraction, or
    plain autograd did not fit; `plain_basis` says how it is known. Of a plan by estimated costs
    that is not to be run, it is the estimated one. `source` is the generated code of a step of one
    region, `left_out` are its ops that run one by one, for compiled in groups they are slower, or
    do not compile, `no_groups` says why all do, where groups were asked for; a plan that was read
    from a file has none of these. `whole_time` is that of computing
    everything once, and nothing in slices; `None` where nothing is, for then the graphs say it.
    `earlier` are hashes of the outlines of graphs that were planned for before this one's came.
    """

    calls: tuple[tuple[str, int], ...]
    kinds: tuple[PlannedRegion, ...]
    chosen: tuple[int, ...]
    budget_bytes: int
    lower_bound: float | None
    origin: Origin
    moments: tuple[TimeStep, ...] = ()
    breaks: tuple[str, ...] = ()
    cuts: tuple[tuple[str, frozenset[int]], ...] = ()
    set_aside_bytes: int = 0
    measured_peak_bytes: int | None = None
    plain_peak_bytes: int | None = None
    plain_basis: Basis = "measured"
    doubt: str | None = None
    status: Status = Status.FEASIBLE
    solver: str = "step"
    solve_seconds: float = 0.0
    trials: tuple[Trial, ...] = ()
    capture_seconds: float = 0.0
    # By a factory, the class has no value of what is not known before a plan is read.
    whole_time: float | None = field(default_factory=lambda: None)
    earlier: tuple[str, ...] = ()
    source: str = field(default_factory=str)
    left_out: tuple[str, ...] = field(default=(), compare=False)
    no_groups: str | None = field(default=None, compare=False)
    measured_curve: tuple[tuple[float, int], ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, budget: int) -> Self:
        """Make a plan of any schedule of a graph, such as another tool's, for a budget in bytes.

        Raises:
            InvalidSchedule: if it is no schedule of the graph.
        """
        timeline = simulate(graph, schedule)
        solution = Solution(
            Status.FEASIBLE, schedule, timeline.time, timeline.peak_bytes, graph.least_time,
            "given", 0.0,
        )  # fmt: skip
        return cls.of_one_region(graph, schedule, solution, budget, origin=Origin.here())

    @classmethod
    def of_one_region(
        cls,
        graph: Graph,
        schedule: Schedule,
        solution: Solution,
        budget: int,
        *,
        missing: frozenset[int] = frozenset(),
        released_outputs: frozenset[int] = frozenset(),
        laid_out: tuple[int, ...] = (),
        sliced: tuple[tuple[int, int], ...] = (),
        deferred: tuple[tuple[int, int], ...] = (),
        unfused: tuple[int, ...] | None = None,
        gives_again: bool = False,
        **facts: Any,
    ) -> Self:
        """Make a plan of the schedule of a region that is all of the step, as it was solved for."""
        front = lone_front(graph, schedule)
        return cls(
            (("the step", 0),),
            (
                PlannedRegion(
                    front,
                    missing,
                    released_outputs,
                    laid_out,
                    sliced,
                    deferred,
                    unfused,
                    gives_again,
                ),
            ),
            (0,),
            budget,
            solution.lower_bound,
            doubt=solution.doubt,
            status=solution.status,
            solver=solution.solver,
            solve_seconds=solution.solve_seconds,
            trials=solution.trials,
            **facts,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises:
            DocumentError: if the file is damaged, or holds something else.
            OSError: if it cannot be read.
        """
        return cls.decode(Path(path).read_bytes(), source=str(path))

    @classmethod
    def decode(cls, data: bytes, *, source: str = "document") -> Self:
        """Read the bytes of a plan file; `source` names it in errors.

        Raises:
            DocumentError: if they are damaged, of something else or another schema version, or say
                what the graphs and schedules in them contradict.
        """
        body = read_body(data, source)
        alone = not body.moments
        try:
            kinds = tuple(
                read_region(kind, f"region {at} of {source}", alone=alone)
                for at, kind in enumerate(body.kinds)
            )
            if len(body.chosen) != len(body.calls):
                raise GraphError(f"{len(body.calls)} calls run by {len(body.chosen)} options")
            for at, ((_, kind), option) in enumerate(zip(body.calls, body.chosen, strict=True)):
                if kind >= len(kinds) or option >= len(kinds[kind].front.options):
                    raise GraphError(f"call {at} is of no option")
            if body.status not in (Status.OPTIMAL, Status.FEASIBLE):
                raise GraphError(f"it has a schedule, and is said to be {body.status.value}")
            for name, times in Counter(name for name, _ in body.cuts).items():
                if times > 1:
                    raise GraphError(f"it cuts {name[:100]!r} twice")
            if alone and body.cuts:
                raise GraphError(f"it is of one region, and cuts {body.cuts[0][0][:100]!r}")
            if alone and not len(kinds) == len(body.calls) == len(kinds[0].front.options) == 1:
                raise GraphError("it has no moments, and more than one call, region or option")
            for moment in body.moments:
                check_moment(moment, len(body.calls))
            shared = {name: getattr(body, name) for name in _AS_WRITTEN}
            plan = cls(kinds=kinds, **shared)
            plan._check(body)
        except (GraphError, SolverError) as error:
            raise DocumentError(f"{source} holds an invalid plan: {error}") from error
        return plan

    def _check(self, body: PlanBody) -> None:
        """Compare what a file says with what its graphs and schedules are.

        Raises:
            GraphError: if it says something else.
        """
        for what, said, peak in (
            ("its schedule", body.predicted_peak_bytes, self.predicted_peak_bytes),
            ("storing everything", body.store_all_peak_bytes, self.store_all_peak_bytes),
        ):
            if said != peak:
                raise GraphError(f"the peak of {what} is {peak:,} bytes, where it says {said:,}")
        if self.lower_bound is not None and self.lower_bound > self.time * (1 + CLOSE):
            raise GraphError(f"it takes {self.time} s, less than its bound, {self.lower_bound} s")

    def encode(self) -> bytes:
        """Give the bytes of a plan file, without generated code; equal plans give equal bytes."""
        body = PlanBody(
            kinds=tuple(write_region(kind) for kind in self.kinds),
            predicted_peak_bytes=self.predicted_peak_bytes,
            store_all_peak_bytes=self.store_all_peak_bytes,
            **{name: getattr(self, name) for name in _AS_WRITTEN},
        )
        return encode_body(body)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, atomically, for `rematerialize(model, plan=path)`.

        Raises:
            OSError: if the folder does not exist or cannot be written.
        """
        write_atomically(path, self.encode())

    @property
    def is_one_region(self) -> bool:
        """Whether one region is all of the step."""
        return not self.moments

    @property
    def regions(self) -> tuple[tuple[str, RegionOption], ...]:
        """The name of each call's region, and the option that it runs by."""
        return tuple(
            (name, self.kinds[kind].front.options[option])
            for (name, kind), option in zip(self.calls, self.chosen, strict=True)
        )

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graph of each call: regions of the same operations share that of the first."""
        return tuple(self.kinds[kind].front.graph for _, kind in self.calls)

    @property
    def options(self) -> tuple[RegionOption, ...]:
        """The option of each call."""
        return tuple(option for _, option in self.regions)

    @cached_property
    def everything(self) -> tuple[RegionOption, ...]:
        """What it costs to store everything, for each call."""
        measure = lone_option if self.is_one_region else measure_option
        graphs = [kind.front.graph for kind in self.kinds]
        stored = [measure(graph, store_all(graph)) for graph in graphs]
        return tuple(stored[kind] for _, kind in self.calls)

    @cached_property
    def graph(self) -> Graph:
        """The step as one graph: of several regions that of all calls, and what is between them."""
        return self.graphs[0] if self.is_one_region else self._whole.graph

    @cached_property
    def schedule(self) -> Schedule:
        """The steps of the plan, of `graph`."""
        return self._schedule_of(self.options)

    @cached_property
    def store_all_schedule(self) -> Schedule:
        """The steps that store everything, of `graph`."""
        return self._schedule_of(self.everything)

    @cached_property
    def _whole(self) -> WholeStep:
        return WholeStep(self.moments, self.graphs)

    def _schedule_of(self, options: Sequence[RegionOption]) -> Schedule:
        schedules = [option.schedule for option in options]
        return schedules[0] if self.is_one_region else self._whole.schedule(schedules)

    @property
    def solution(self) -> Solution:
        """The schedule, and what is known of it, as a solver gives it."""
        return Solution(
            self.status, self.schedule, self.time, self.predicted_peak_bytes, self.lower_bound,
            self.solver, self.solve_seconds, self.trials, self.doubt,
        )  # fmt: skip

    def solution_on(self, graph: Graph, schedule: Schedule) -> Solution:
        """Give what is known of its schedule on another graph, in the names of that.

        Of that nothing is proved.

        Raises:
            InvalidSchedule: if it is no schedule of the graph.
        """
        timeline = simulate(graph, schedule)
        return replace(
            self.solution, schedule=schedule, time=timeline.time, peak_bytes=timeline.peak_bytes,
            status=Status.FEASIBLE, lower_bound=graph.least_time, trials=(),
        )  # fmt: skip

    @property
    def predicted_peak_bytes(self) -> int:
        """The most that the step holds, with what is set aside.

        Each draw of random numbers is taken to save the state of its generator.
        """
        return peak_of(self.moments, self.options) + self.set_aside_bytes

    @property
    def store_all_peak_bytes(self) -> int:
        """The most that the step holds if everything is stored."""
        return peak_of(self.moments, self.everything)

    @property
    def time(self) -> float:
        """The time of all calls."""
        return sum(option.time for option in self.options)

    @property
    def numerics(self) -> Numerics | None:
        """How exact what it runs by choice or in another layout is; `None` if nothing is."""
        return least_exact(op for graph, schedule in self.runs for op in run_of(graph, schedule))

    @property
    def predicted_overhead(self) -> float:
        """Time beyond computing everything once and nothing in slices, as a fraction of that."""
        return self._overhead(self.time)

    @property
    def bound_overhead(self) -> float | None:
        """The least overhead of any schedule in this order, if proved.

        It may be negative where there are other ways to make a value.
        """
        return None if self.lower_bound is None else self._overhead(self.lower_bound)

    def _overhead(self, time: float) -> float:
        once = self.whole_time
        if once is None:
            once = sum(graph.time for graph in self.graphs)
        return time / once - 1 if once else 0.0

    @property
    def recomputations(self) -> int:
        """Number of operations run a second time or more, each time."""
        runs = (
            Counter(step.op for step in option.schedule if isinstance(step, Compute))
            for option in self.options
        )
        return sum(run.total() - len(run) for run in runs)

    @property
    def runs(self) -> tuple[tuple[Graph, Schedule], ...]:
        """The graph and the schedule of each call."""
        return tuple(
            (graph, option.schedule)
            for graph, option in zip(self.graphs, self.options, strict=True)
        )


def run_of(graph: Graph, schedule: Schedule) -> list[Op]:
    """List the ops of a graph that a schedule runs."""
    run = {step.op for step in schedule if isinstance(step, Compute)}
    return [op for op in graph.ops if op.name in run]


def least_exact(ops: Iterable[Op]) -> Numerics | None:
    """Find how exact the least exact op is that stands for others, packs, or is laid out anew."""
    exactness = {op.numerics for op in ops if not op.owed or op.numerics is not Numerics.BITWISE}
    return max(exactness, key=list(Numerics).index, default=None)
