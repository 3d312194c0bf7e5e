"""What a plan of one graph promises."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from remat.errors import RematError
from remat.plans.file import encode_plan, read_plan
from remat.plans.origin import Origin
from remat.plans.reads import compared
from remat.plans.saved import SavedPlan
from remat.report.curve import Curve
from remat.report.explaining import By, Explanation, explain
from remat.report.notebook import notebook_page
from remat.report.page import Chapter, check_plotly, report_page
from remat.report.traces import save_trace
from remat.report.words import mib, mib_or_dash
from remat_graph import (
    Compute,
    Graph,
    Numerics,
    Op,
    Schedule,
    Solution,
    Stage,
    Status,
    simulate,
    write_atomically,
)
from remat_solvers import Tradeoff, store_all, tradeoff

__all__ = ["Plan", "compared_row", "recomputed"]


@dataclass(frozen=True, slots=True)
class Plan(SavedPlan):
    """A schedule for one training graph, and what is known about it.

    Sizes in bytes, times in seconds by the costs of the graph. `plain_peak_bytes` is plain
    autograd's measured peak, `None` if the budget is no fraction of it, or it did not fit; of a
    plan by estimated costs that is not to be run, the estimated one. `predicted_peak_bytes` is the
    schedule's: each draw of random numbers is taken to save the state of its generator, and what a
    loss outside the module keeps is a value of the graph. `measured_peak_bytes` is the peak of one
    real run of the plan, `None` for a plan that was not run. `missing` are the positions of outputs
    whose gradients it takes not to come, `released_outputs` those of outputs that it takes the user
    to hold no more when the backward starts. `laid_out` are the ops that run in channels_last, as
    `Capture.laid_out` numbers them. `source` is the generated code; a plan that was read from a
    file has none. `measured_curve` pairs the seconds of that real run with the bytes that it held
    then, known on the CPU; files leave it out.
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
    released_outputs: frozenset[int] = frozenset()
    laid_out: tuple[int, ...] = ()
    measured_curve: tuple[tuple[float, int], ...] = field(default=(), compare=False, repr=False)

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
    def decode(cls, data: bytes, *, source: str = "document") -> Plan:
        """Read the bytes of a plan file; `source` names it in errors.

        Raises:
            DocumentError: if they are damaged, or of something else.
        """
        return cls(**read_plan(data, source=source))

    def encode(self) -> bytes:
        """Give the bytes of a plan file, without generated code; equal plans give equal bytes."""
        return encode_plan(self)

    @property
    def schedule(self) -> Schedule:
        """The steps of the plan."""
        if self.solution.schedule is None:
            raise RematError("the plan has no schedule")
        return self.solution.schedule

    @property
    def numerics(self) -> Numerics | None:
        """How exact what it runs by choice or in another layout is; `None` if nothing is."""
        run = {step.op for step in self.schedule if isinstance(step, Compute)}
        return least_exact(op for op in self.graph.ops if op.name in run)

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
        return recomputed(self.schedule)

    def explain(self, *, by: By = "line", depth: int | None = None) -> Explanation:
        """Say of each module and source line what is kept, computed again, or made another way.

        `by="module"` takes all lines of a module together, `depth` so many components of its path.

        Raises:
            RematError: if `by` is something else, or `depth` is negative.
        """
        return explain(self.graph, self.schedule, self.budget_bytes, by=by, depth=depth)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "remat plan",
        curve: bool | Tradeoff = False,
        limit_seconds: float | None = None,
    ) -> None:
        """Write what the plan does into one HTML file, which can be read offline.

        `title` is its heading: a plan does not know the name of its model. With `curve`, the curve
        of time against memory is drawn: the one that is given, or one of eight budgets that are
        solved for, all within `limit_seconds` (15 s each, else).

        Raises:
            RematError: if plotly is missing: it comes with `remat[report]`.
            OSError: if the folder does not exist or cannot be written.
        """
        check_plotly()
        drawn = curve if isinstance(curve, Tradeoff) else None
        if curve is True:
            drawn = tradeoff(self.graph, limit_seconds=limit_seconds)
        chapter = Chapter(
            "The step", self.graph, self.schedule, self.budget_bytes,
            lower_bound=self.solution.lower_bound,
            curve=None if drawn is None else Curve.of(drawn),
        )  # fmt: skip
        facts = [*self._rows(), ("made with", str(self.origin))]
        write_atomically(path, report_page(title, facts, [chapter]))

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what runs and what is held, as planned and as measured, for another tool.

        A `.json` is for Perfetto and chrome://tracing, a `.pickle` for pytorch.org/memory_viz.
        Times are the costs of the graph. What one real run held by the clock stands beside it, as
        "held, measured" or device 1, where `measured_curve` has it.

        Raises:
            RematError: if the file has another ending.
            OSError: if the folder does not exist or cannot be written.
        """
        facts = {
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
        }
        save_trace(self.graph, self.schedule, path, facts, self.measured_curve)

    def _repr_html_(self) -> str:
        """Say it in a notebook: what `print` says, and what is held over the step."""
        drawn = {"this plan": self.schedule, "storing everything": store_all(self.graph)}
        return notebook_page(self._rows(), self.graph, drawn, self.budget_bytes)

    def __str__(self) -> str:
        """Say it readably."""
        return "\n".join(["remat plan", *(f"  {name:<20} {text}" for name, text in self._rows())])

    def _rows(self) -> list[tuple[str, str]]:
        forward = sum(op.stage is Stage.FORWARD for op in self.graph.ops)
        return [
            ("operations", f"{forward} forward, {len(self.graph.ops) - forward} backward, "
                           f"{self.recomputations} recomputed"),
            ("budget", mib(self.budget_bytes)),
            ("peak, predicted", mib(self.predicted_peak_bytes)),
            ("peak, measured", "the plan was not run" if self.measured_peak_bytes is None
                               else mib(self.measured_peak_bytes)),
            ("plain autograd", mib_or_dash(self.plain_peak_bytes)),
            ("storing everything", mib(self.store_all_peak_bytes)),
            ("overhead, predicted", f"{100 * self.predicted_overhead:.2f}%"),
            ("overhead, at least", "unknown" if self.bound_overhead is None
                                   else f"{100 * self.bound_overhead:.2f}%"),
            *(("not certified", doubt) for doubt in [self.solution.doubt] if doubt),
            *(("made another way", text) for text in _other_ways(self.graph, self.schedule)),
            *compared_row(len(compared(self.graph, self.schedule))),
            ("solver", f"{self.solution.solver} ({self.solution.status.value}), "
                       f"{self.solution.solve_seconds:.1f} s after {self.capture_seconds:.1f} s "
                       f"of capture"),
        ]  # fmt: skip


def _other_ways(graph: Graph, schedule: Schedule) -> Iterator[str]:
    """Say what runs by alternatives, what is kept packed, and how exact that is."""
    run = {graph.op_index[step.op] for step in schedule if isinstance(step, Compute)}
    ops = [graph.ops[index] for index in sorted(run)]
    laid = sum(op.owed and op.numerics is Numerics.ROUNDING for op in ops)
    if laid:
        yield f"{laid} operations in channels_last, {Numerics.ROUNDING.value}"
    chosen = [op for op in ops if not op.owed]
    if not chosen:
        return
    packed = [op for op in ops if op.optional]
    size = graph.value_by_name
    kept = sum(size[v].size_bytes for op in packed for v in op.outputs)
    least = least_exact(chosen)
    yield (
        f"{len(chosen) - len(packed)} operations, {len(packed)} values kept packed "
        f"({mib(kept)}), {least}"
    )


def compared_row(count: int) -> list[tuple[str, str]]:
    """Say how many tensors are compared before the backward, if any are."""
    text = f"{count} tensors that eager would not keep, before the backward reads them"
    return [("compared", text)] if count else []


def least_exact(ops: Iterable[Op]) -> Numerics | None:
    """Find how exact the least exact op is that stands for others, packs, or is laid out anew."""
    found = {op.numerics for op in ops if not op.owed or op.numerics is not Numerics.BITWISE}
    return max(found, key=list(Numerics).index, default=None)


def recomputed(schedule: Schedule) -> int:
    """Count the operations that a schedule runs a second time or more, each time."""
    computed = [step.op for step in schedule if isinstance(step, Compute)]
    return len(computed) - len(set(computed))
