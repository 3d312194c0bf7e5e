"""What a plan of a step of several regions promises."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from remat.budgets.plain_step import Basis
from remat.plans.origin import Origin
from remat.plans.plan import compared_row, recomputed
from remat.plans.reads import compared
from remat.plans.saved import SavedPlan
from remat.plans.step_file import encode_step, read_step
from remat.report.curve import curve_of_step
from remat.report.explaining import By, Explanation, explain
from remat.report.notebook import notebook_page
from remat.report.page import Chapter, check_plotly, report_page
from remat.report.traces import save_trace
from remat.report.whole_step import WholeStep
from remat.report.words import mib, mib_or_dash
from remat_graph import Graph, Schedule, printable, write_atomically
from remat_solvers import store_all
from remat_solvers.step import Moment, RegionFront, RegionOption, measure_option

__all__ = ["RegionOfStep", "StepPlan", "peak_of"]

_BASES: dict[Basis, str] = {
    "measured": "",
    "in proportion": ", by one step that was measured, in proportion to what regions keep",
    "predicted": ", predicted: a plain step could not be measured",
}


@dataclass(frozen=True, slots=True)
class RegionOfStep:
    """A graph that calls of a step share: its options, and the gradients taken not to come.

    `missing` are positions of outputs. `front.options` are schedules of it, in the order in which
    they keep more.
    """

    front: RegionFront
    missing: frozenset[int] = frozenset()

    @property
    def everything(self) -> RegionOption:
        """What it costs to store everything."""
        return measure_option(self.front.graph, store_all(self.front.graph))


@dataclass(frozen=True, slots=True)
class StepPlan(SavedPlan):
    """What was planned for a step of several regions; sizes in bytes, times in seconds.

    `calls` are pairs of a name and a position in `kinds`, one for each call of a region, in order;
    regions of the same operations and sizes are of one kind. `chosen` is the position of the option
    of each call, among those of its kind. `moments` are what a recorded step was like: what the
    code between the regions held while which calls were between their halves. `set_aside_bytes`
    are kept free beside it, since steps by earlier plans took more.

    `breaks` say why the forward is not one region. `measured_peak_bytes` is that of the first step
    that ran by this plan, or the most of the first eight where there are other ranks; `None`
    before. `plain_peak_bytes` is what the budget is a fraction of, the most that plain autograd
    takes for a step of those seen before, `None` if it is no fraction; `plain_basis` says how that
    is known. No plan of the regions within the budget takes less time than `lower_bound`; `doubt`
    is as that of a `Solution`.
    """

    calls: tuple[tuple[str, int], ...]
    kinds: tuple[RegionOfStep, ...]
    chosen: tuple[int, ...]
    moments: tuple[Moment, ...]
    breaks: tuple[str, ...]
    budget_bytes: int
    lower_bound: float
    origin: Origin
    set_aside_bytes: int = 0
    measured_peak_bytes: int | None = None
    doubt: str | None = None
    plain_peak_bytes: int | None = None
    plain_basis: Basis = "measured"

    @classmethod
    def decode(cls, data: bytes, *, source: str = "document") -> StepPlan:
        """Read the bytes of a plan file; `source` names it in errors.

        Raises:
            DocumentError: if they are damaged, or of something else.
        """
        return cls(**read_step(data, RegionOfStep, source=source))

    def encode(self) -> bytes:
        """Give the bytes of a plan file, without generated code; equal plans give equal bytes."""
        return encode_step(self)

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

    @property
    def predicted_peak_bytes(self) -> int:
        """The most that the step holds, with what is set aside."""
        return peak_of(self.moments, self.options) + self.set_aside_bytes

    @property
    def store_all_peak_bytes(self) -> int:
        """The most that the step holds if all of its regions store everything."""
        everything = [kind.everything for kind in self.kinds]
        return peak_of(self.moments, [everything[kind] for _, kind in self.calls])

    @property
    def time(self) -> float:
        """The time of all calls, by the costs of their graphs."""
        return sum(option.time for option in self.options)

    @property
    def least_time(self) -> float:
        """The time of all calls if nothing is computed twice."""
        return sum(graph.time for graph in self.graphs)

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
        return sum(recomputed(option.schedule) for option in self.options)

    def explain(
        self, *, by: By = "line", depth: int | None = None
    ) -> tuple[tuple[str, Explanation], ...]:
        """Say it of each region by itself, one after the other; their names come first.

        What a value would take if it was kept is compared with the most that its region holds.
        Calls of one region by one option are told once, and regions that share a graph by the
        modules of the first.

        Raises:
            RematError: if `by` is something else, or `depth` is negative.
        """
        found = dict(zip(self.regions, self.graphs, strict=True))
        return tuple(
            (name, explain(graph, option.schedule, option.peak_bytes, by=by, depth=depth,
                           limit="what the region may hold"))
            for (name, option), graph in found.items()
        )  # fmt: skip

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        title: str | None = None,
        curve: bool = False,
        limit_seconds: float | None = None,
    ) -> None:
        """Write what the plan does into one HTML file: the step as a whole, then each region.

        `title` is its heading: a plan does not know the name of its model. With `curve`, the curve
        of time against memory is drawn, of eight budgets, for each of which options of the regions
        are chosen, all within `limit_seconds` (mostly a second each, else).

        Raises:
            RematError: if plotly is missing: it comes with `remat[report]`.
            OSError: if the folder does not exist or cannot be written.
        """
        check_plotly()
        drawn = None
        if curve:
            known = [k.front.with_([k.everything], ()) for k in self.kinds]
            fronts = [known[kind] for _, kind in self.calls]
            most = self.store_all_peak_bytes
            drawn = curve_of_step(fronts, self.moments, most, limit_seconds)
        graph, planned, plain = self._as_one
        limit = "the budget, less what is set aside" if self.set_aside_bytes else "the budget"
        whole = Chapter(
            "The step", graph, planned, self.budget_bytes - self.set_aside_bytes, limit,
            lower_bound=self.lower_bound, curve=drawn, plain=plain, step_of_regions=True,
        )  # fmt: skip
        found = dict(zip(self.regions, self.graphs, strict=True))
        chapters = [
            Chapter(name, graph, option.schedule, option.peak_bytes, "what the region may hold")
            for (name, option), graph in found.items()
        ]
        facts = [*self._rows(), ("made with", str(self.origin))]
        write_atomically(path, report_page(title or self._title, facts, [whole, *chapters]))

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what runs and what is held, as planned, for another tool.

        A `.json` is for Perfetto and chrome://tracing, a `.pickle` for pytorch.org/memory_viz.
        Times are the costs of the graphs; what runs between the regions takes none here.

        Raises:
            RematError: if the file has another ending.
            OSError: if the folder does not exist or cannot be written.
        """
        facts = {
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
        }
        graph, planned, _ = self._as_one
        save_trace(graph, planned, path, facts)

    def _repr_html_(self) -> str:
        """Say it in a notebook: what `print` says, and what is held over the step."""
        graph, planned, plain = self._as_one
        drawn = {"this plan": planned, "storing everything": plain}
        return notebook_page(self._rows(), graph, drawn, self.budget_bytes)

    @property
    def _as_one(self) -> tuple[Graph, Schedule, Schedule]:
        """The step as one graph, the schedule that is planned, and one that stores everything."""
        whole = WholeStep(self.moments, self.graphs)
        plain = [store_all(graph) for graph in self.graphs]
        planned = [option.schedule for option in self.options]
        return whole.graph, whole.schedule(planned), whole.schedule(plain)

    def __str__(self) -> str:
        """Say it readably."""
        return "\n".join([self._title, *(f"  {name:<20} {text}" for name, text in self._rows())])

    @property
    def _title(self) -> str:
        count = len(self.calls)
        return f"remat plan of {count} calls of regions" if count > 1 else "remat plan of one call"

    def _rows(self) -> list[tuple[str, str]]:
        told = Counter(
            (name, option.kept_bytes, option.peak_bytes) for name, option in self.regions
        )
        calls = zip(self.graphs, self.options, strict=True)
        count = sum(len(compared(graph, option.schedule)) for graph, option in calls)
        return [
            ("budget", mib(self.budget_bytes)),
            ("peak, predicted", mib(self.predicted_peak_bytes)),
            ("peak, measured", mib_or_dash(self.measured_peak_bytes)),
            ("plain autograd", mib_or_dash(self.plain_peak_bytes) + _BASES[self.plain_basis]),
            ("storing everything", mib(self.store_all_peak_bytes)),
            ("overhead, predicted", f"{100 * self.predicted_overhead:.2f}%"),
            ("overhead, at least", f"{100 * self.bound_overhead:.2f}%"),
            *(("not certified", doubt) for doubt in [self.doubt] if doubt),
            *compared_row(count),
            *(
                (printable(name), f"{_times(count)}keeps {mib(kept)}, peak {mib(peak)}")
                for (name, kept, peak), count in told.items()
            ),
            *(("break", printable(" ".join(reason.split()))) for reason in self.breaks),
        ]


def peak_of(moments: Sequence[Moment], options: Sequence[RegionOption]) -> int:
    """Give the most that is held at any moment if each call runs by this option."""
    most = 0
    for moment in moments:
        held = moment.fixed_bytes + sum(n * options[r].kept_bytes for r, n in moment.live)
        if moment.running is not None:
            region, half = moment.running
            option = options[region]
            held += option.forward_bytes if half == "forward" else option.backward_bytes
        most = max(most, held)
    return most


def _times(count: int) -> str:
    return f"{count} times " if count > 1 else ""
