"""A plan that the user brings, in place of solving: `rematerialize(model, plan=...)`.

It is used where a fresh capture of a region has the same outline, by positions instead of names,
and passes the simulator, the budget and a measured run as any plan does. Each region of a model
that has several is looked for among those of the plan.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from remat.errors import PlanMismatch, RematError
from remat.plans.file import is_plan
from remat.plans.outlines import Outline
from remat.plans.plan import Plan, least_exact
from remat.plans.regions import PlannedRegion, lone_front
from remat_exec import BudgetExceeded
from remat_graph import (
    Graph,
    InvalidSchedule,
    Numerics,
    Schedule,
    Solution,
    canonical_hash,
    decode,
    leaves,
    simulate,
)
from remat_graph.torch import Capture
from remat_solvers.step import RegionFront, front_from_schedules, measure_option

__all__ = ["PlanLike", "PlanOrSchedule", "UserPlan", "over_budget", "read_user_plan"]

PlanLike = Plan | Schedule | Solution | str | os.PathLike[str]

_REMEDY = "Make the plan again for this model and call, or leave plan= out"


@dataclass(frozen=True, slots=True)
class UserPlan:
    """A plan; errors call it by `name`."""

    plan: Plan
    name: str

    @property
    def budget_bytes(self) -> int:
        """The budget that it was made for."""
        return self.plan.budget_bytes

    @property
    def is_one_region(self) -> bool:
        """Whether it is of a model that is one region."""
        return self.plan.is_one_region

    @property
    def pattern(self) -> tuple[int, ...]:
        """The kind of each call of the step."""
        return tuple(kind for _, kind in self.plan.calls)

    def fit(self, captured: Capture, numerics: Numerics | None) -> tuple[Capture, Schedule]:
        """Give the schedule of its only region in the names of a capture.

        The capture is given for the gradients and outputs that it is for, and with the alternatives
        and layouts that a plan was made with, which must run nothing less exact than `numerics`,
        that is what was asked for.

        Raises:
            PlanMismatch: if it is of another graph, saying where that first differs, or less exact.
        """
        self.check_numerics(numerics)
        fitted = self.fit_kind(0, captured)
        if fitted is None:
            raise PlanMismatch(
                f"{self.name} was made for another graph: {self._difference(0, captured)}. "
                f"{_REMEDY}"
            )
        variant, front = fitted
        return variant, front.options[0].schedule

    def check_numerics(self, numerics: Numerics | None) -> None:
        """Check that the plan runs nothing less exact than was asked for.

        Raises:
            PlanMismatch: if it does.
        """
        run = self.plan.numerics
        if run is not None and not (numerics is not None and numerics.allows(run)):
            asked = "was not given" if numerics is None else f"is {numerics.value!r}"
            raise PlanMismatch(
                f"{self.name} makes values in other ways, numerics={run.value!r}, and numerics= "
                f"{asked} here; give numerics={run.value!r}, or make the plan again without"
            )

    def fit_kind(self, kind: int, captured: Capture) -> tuple[Capture, RegionFront] | None:
        """Give the options of a kind of regions for a capture; `None` if it is of another kind."""
        region = self.plan.kinds[kind]
        there = Outline.of(region.front.graph)
        if not any(leaves(op.name) for op in region.front.graph.ops):
            captured = captured.with_leaving_gradients(frozenset())
        for variant in _variants(captured, region, alone=self.is_one_region):
            program = variant
            if not self.is_one_region:  # options of regions have no alternatives
                program = replace(variant, graph=variant.graph.without_alternatives())
            here = Outline.of(program.graph)
            if there.hash == here.hash:
                return program, self._translated(region.front, there, program.graph, here)
        return None

    def _translated(
        self, front: RegionFront, there: Outline, graph: Graph, here: Outline
    ) -> RegionFront:
        """Translate options into the names of another graph, in the same order, and measure them.

        What was proved holds where costs are the same.
        """
        schedules = [there.translate(option.schedule, here) for option in front.options]
        if self.is_one_region:
            return lone_front(graph, schedules[0])
        same = canonical_hash(front.graph) == canonical_hash(graph)
        options = tuple(
            measure_option(graph, schedule, lower_bound=option.lower_bound if same else None)
            for schedule, option in zip(schedules, front.options, strict=True)
        )
        return replace(
            front if same else front_from_schedules(graph, ()), graph=graph, options=options
        )

    def mismatch(self, position: int, name: str, captured: Capture) -> PlanMismatch:
        """Say how the region of a call differs from that of the plan in this place."""
        calls = self.plan.calls
        difference = f"it has {len(calls)} calls of regions"
        if position < len(calls):
            its_name, kind = calls[position]
            difference = (
                f"its call {position} is of {its_name[:100]!r}, with "
                f"{self._difference(kind, captured)}"
            )
        return PlanMismatch(
            f"{self.name} has no plan for the region of call {position} of the step, {name!r}: "
            f"{difference}{self._cuts()}. {_REMEDY}"
        )

    def cut_mismatch(self, name: str) -> PlanMismatch:
        """Say that a region cannot be cut where the plan cuts it."""
        return PlanMismatch(
            f"the model's {name!r} has no such outputs, or cannot be cut there{self._cuts()}. "
            f"{_REMEDY}"
        )

    def _cuts(self) -> str:
        """Say where the plan cuts regions, if it does."""
        cuts = (
            f"{name[:100]!r} at output {', '.join(map(str, sorted(outputs)[:5]))}"
            for name, outputs in self.plan.cuts[:5]
        )
        return f"; {self.name} cuts {', '.join(cuts)}" if self.plan.cuts else ""

    def _difference(self, kind: int, captured: Capture) -> str | None:
        """Say where a graph as the plan would have it first differs from that of the plan."""
        region = self.plan.kinds[kind]
        *_, variant = _variants(captured, region, alone=self.is_one_region)
        there, here = Outline.of(region.front.graph), Outline.of(variant.graph)
        return there.difference(here, self.name, "the model")

    def difference(self, pattern: Sequence[int], names: Sequence[str]) -> str | None:
        """Say where the calls of a step differ from those of the plan; `None` if they do not."""
        mine = self.pattern
        if mine == tuple(pattern):
            return None
        at = next(
            (at for at, pair in enumerate(zip(pattern, mine, strict=False)) if len(set(pair)) > 1),
            min(len(pattern), len(mine)),
        )
        here = repr(names[at]) if at < len(names) else "missing"
        there = repr(self.plan.calls[at][0][:100]) if at < len(mine) else "missing"
        return (
            f"the step has {len(pattern)} calls of regions, {self.name} {len(mine)}; call {at} is "
            f"{here} in the step, {there} in {self.name}"
        )

    def solution(self, graph: Graph, schedule: Schedule, target: int, budget: int) -> Solution:
        """Judge its schedule on a graph, which must not take more than `target`.

        What was proved of it holds where costs and budget are the same.

        Raises:
            BudgetExceeded: if it takes more, speaking of the budget.
        """
        plan = self.plan
        solution = _within(self.name, plan.solution_on(graph, schedule), target, budget)
        same = canonical_hash(plan.graph) == canonical_hash(graph)
        if not same or plan.budget_bytes != budget:
            return solution
        return replace(plan.solution, schedule=schedule)


@dataclass(frozen=True, slots=True)
class UserSchedule:
    """A bare schedule in the names of the model's own graph; errors call it by `name`."""

    schedule: Schedule
    name: str
    budget_bytes: ClassVar[None] = None
    is_one_region: ClassVar[bool] = True

    def fit(self, captured: Capture, numerics: Numerics | None) -> tuple[Capture, Schedule]:
        """Check it on a capture.

        Raises:
            PlanMismatch: if it is no schedule of its graph.
        """
        try:
            simulate(captured.graph, self.schedule)
        except InvalidSchedule as error:
            raise PlanMismatch(
                f"{self.name} is no schedule of the model's graph: {error}. Names differ from "
                f"capture to capture; give the schedule with the graph that it was made for, as "
                f"remat.Plan.of(graph, schedule, budget)"
            ) from None
        return captured, self.schedule

    def solution(self, graph: Graph, schedule: Schedule, target: int, budget: int) -> Solution:
        """Judge it; as that of a plan, of which nothing is proved."""
        solution = Plan.of(graph, schedule, budget).solution
        return _within(self.name, solution, target, budget)


PlanOrSchedule = UserPlan | UserSchedule


def over_budget(name: str, peak: int, budget: int) -> BudgetExceeded:
    """Say that the user's plan takes more than the budget here."""
    return BudgetExceeded(
        f"{name} takes {peak:,} bytes here, over the budget of {budget:,}; raise the budget, or "
        f"leave plan= out and have another plan made",
        budget,
        peak,
    )


def read_user_plan(plan: PlanLike) -> PlanOrSchedule:
    """Take a plan, a schedule, a solution, or a file of one of these.

    Raises:
        DocumentError: if the file is damaged.
        OSError: if it cannot be read.
        RematError: if it holds something else, or no schedule.
    """
    name = "the plan"
    item: object = plan
    if isinstance(plan, str | os.PathLike):
        name = os.fspath(plan)
        data = Path(name).read_bytes()
        item = Plan.decode(data, source=name) if is_plan(data) else decode(data, source=name)
    if isinstance(item, Plan):
        return UserPlan(item, name)
    if isinstance(item, Solution):
        item = item.schedule
    if isinstance(item, Schedule):
        return UserSchedule(item, name)
    raise RematError(
        f"plan={plan!r} has no schedule; give a plan, a Schedule, a Solution with a schedule, or "
        f"the path of a file with one of these"
    )


def _within(name: str, solution: Solution, target: int, budget: int) -> Solution:
    """Give a solution that takes no more than `target`.

    Raises:
        BudgetExceeded: if it takes more, speaking of the budget.
    """
    if solution.peak_bytes > target:
        raise over_budget(name, solution.peak_bytes + budget - target, budget)
    return solution


def _variants(captured: Capture, region: PlannedRegion, *, alone: bool) -> Iterator[Capture]:
    """Give a capture as it is, and as a plan takes it: without gradients, outputs not made or held.

    Both have the alternatives and layouts of the plan's graph. What a loss outside takes is part of
    the graph of a region that is `alone`; for other gradients it is another. Of one that is not,
    all outputs are let go of: which are held is part of the moments.
    """
    own = plain = captured.without_alternatives()
    yield _with_ways_of(plain, region)
    missing = region.missing
    if missing and missing < set(plain.program.tangents.values()) | plain.missing:
        plain = plain.variant(missing)
        if not alone:
            plain = plain.with_loss(captured.loss)
    deferred = frozenset(position for position, _ in region.deferred)
    plain = plain.with_deferred_outputs(deferred & plain.deferrable)
    returned = frozenset(range(len(plain.program.returned)))
    plain = plain.with_released_outputs(region.released_outputs & returned if alone else returned)
    if deferred and own.missing != missing:  # outputs are in another order, as in a whole module
        yield _with_ways_of(own.with_deferred_outputs(_of_sizes(own, region.deferred)), region)
    yield _with_ways_of(plain, region)


def _of_sizes(captured: Capture, deferred: Iterable[tuple[int, int]]) -> frozenset[int]:
    """Find outputs that can be left out, of the sizes of those that a plan leaves out."""
    sizes = Counter(size for _, size in deferred)
    found = set()
    for position in sorted(captured.deferrable):
        size = captured.deferred_bytes(frozenset({position}))
        if sizes[size] > 0:
            sizes[size] -= 1
            found.add(position)
    return frozenset(found)


def _with_ways_of(captured: Capture, region: PlannedRegion) -> Capture:
    numerics = least_exact(region.front.graph.ops)
    if numerics is None:
        return captured
    able = captured.with_alternatives(numerics, laid_out=region.laid_out)
    if region.unfused is not None:
        able = able.in_groups(region.unfused, give_again=region.gives_again)
    if not region.sliced or any(kind >= len(able.cuts) for kind, _ in region.sliced):
        return able  # of another graph, which its outline says
    return able.in_slices(region.sliced)
