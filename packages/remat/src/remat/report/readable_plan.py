"""The plan that users hold: what was planned, and the ways to show it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from remat.plans.plan import Plan
from remat.report.curve import Curve
from remat.report.explanation import By, Explanation, explain
from remat.report.facts import facts_of, title_of
from remat.report.notebook import notebook_page
from remat.report.page import Chapter, check_plotly, report_page
from remat.report.traces import save_trace
from remat_graph import Graph, Schedule, write_atomically
from remat_solvers import Tradeoff
from remat_solvers.step import RegionOption

__all__ = ["ReadablePlan"]

_OF_REGION = "what the region may hold"


class ReadablePlan(Plan):
    """What was planned for a training step; sizes in bytes, times in seconds by costs of graphs.

    `calls` are pairs of a name and a position in `kinds`, the regions with their options; `chosen`
    is the position of the option of each call. `breaks` say why the forward is not one region.
    `measured_peak_bytes` is that of a real step by this plan, `None` before; `plain_peak_bytes` is
    what a fraction is of. No plan within the budget, in the order of the graphs, takes less time
    than `lower_bound`; `doubt` says why no more is certified. `source` is the generated code of a
    step of one region; a plan that was read from a file has none.
    """

    @classmethod
    def later(
        cls, make: Callable[[], ReadablePlan], schedule: Schedule, **facts: Any
    ) -> ReadablePlan:
        """Give the plan of a schedule that `make` will give, when more of it is read than `facts`.

        These are fields, among them all that the class has a value of, and that are others here.
        """
        plan = object.__new__(cls)
        vars(plan).update(facts, schedule=schedule, _make=make)
        return plan

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            own = vars(self)
            if (make := own.get("_make")) is not None:
                own.update(vars(make()))
                own.pop("_make", None)
            elif name not in own:  # another thread may have made it by now
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self, name)

    def __getstate__(self) -> dict[str, Any]:
        _ = self.kinds  # all of it is there then
        return dict(vars(self))

    def explain(self, *, by: By = "line", depth: int | None = None) -> Explanation:
        """Explain what each module and source line keeps, computes again, or makes another way.

        `by="module"` takes all lines of a module together, `depth` so many components of its path.
        Of several regions, `regions` has an explanation of each: it compares what a value would
        take if it was kept with the most that its region holds. Calls of one region by one option
        are explained once; regions that share a graph are named by the modules of the first.

        Raises:
            RematError: if `by` is something else, or `depth` is negative.
        """
        budget = self.budget_bytes - self.set_aside_bytes
        step = explain(self.graph, self.schedule, budget, by=by, depth=depth)
        if self.is_one_region:
            return step
        regions = tuple(
            explain(graph, option.schedule, option.peak_bytes, by=by, depth=depth,
                    limit=_OF_REGION, name=name)
            for (name, option), graph in self._distinct()
        )  # fmt: skip
        parts = tuple(part for region in regions for part in region.parts)
        return replace(step, parts=parts, regions=regions)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        title: str | None = None,
        curve: bool | Tradeoff = False,
        limit_seconds: float | None = None,
    ) -> None:
        """Write what the plan does into one HTML file, which can be read offline.

        Of several regions, the step as a whole comes first, then each of them. `title` is its
        heading: a plan does not know the name of its model. With `curve`, the curve of time against
        memory is drawn: the one that is given, or one of eight budgets, all within `limit_seconds`.
        They are solved for (15 s each, else), or, of several regions, options are chosen for each
        (mostly a second).

        Raises:
            RematError: if plotly is missing: it comes with `remat[report]`.
            OSError: if the folder does not exist or cannot be written.
        """
        check_plotly()
        if isinstance(curve, Tradeoff):
            drawn: Curve | None = Curve.of(curve)
        else:
            drawn = Curve.of_plan(self, limit_seconds) if curve else None
        limit = "the budget, less what is set aside" if self.set_aside_bytes else "the budget"
        step = Chapter(
            "The step", self.graph, self.schedule, self.budget_bytes - self.set_aside_bytes, limit,
            self.lower_bound, drawn, self.store_all_schedule,
            step_of_regions=not self.is_one_region,
        )  # fmt: skip
        regions = [] if self.is_one_region else [
            Chapter(name, graph, option.schedule, option.peak_bytes, _OF_REGION)
            for (name, option), graph in self._distinct()
        ]  # fmt: skip
        facts = [*facts_of(self), ("made with", str(self.origin))]
        write_atomically(path, report_page(title or title_of(self), facts, [step, *regions]))

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what runs and what is held, as planned and as measured, for another tool.

        A `.json` is for Perfetto and chrome://tracing, a `.pickle` for pytorch.org/memory_viz.
        Times are the costs of the graphs; what runs between regions takes none here. What one real
        run held by the clock stands beside it, as "held, measured" or device 1, where
        `measured_curve` has it.

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

    def __str__(self) -> str:
        """Give its facts in words, a line each."""
        rows = (f"  {name:<20} {text}" for name, text in facts_of(self))
        return "\n".join([title_of(self), *rows])

    def _repr_html_(self) -> str:
        """Show it in a notebook: what `print` shows, and what is held over the step."""
        drawn = {"this plan": self.schedule, "storing everything": self.store_all_schedule}
        return notebook_page(facts_of(self), self.graph, drawn, self.budget_bytes)

    def _distinct(self) -> Iterable[tuple[tuple[str, RegionOption], Graph]]:
        """List each region once for each option that calls of it run by, and its graph."""
        return dict(zip(self.regions, self.graphs, strict=True)).items()
