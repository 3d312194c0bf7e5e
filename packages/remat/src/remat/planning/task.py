"""What one region is planned for: what is offered within a budget, solved, refused, made to run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remat.budgets.plain import has_room_for_plain
from remat.cache import smallest_known
from remat.errors import RematError
from remat.planning.certain_bound import with_certain_bound
from remat.planning.kernels import why_no_groups
from remat.planning.one_region import readable_plan
from remat.planning.outputs import note_what_loss_reads
from remat.planning.ranks import with_schedule_of_first_rank
from remat.planning.settings import Settings
from remat.planning.slices import note_what_slices_reach, sliced_programs, whole_programs
from remat.planning.solving import adapted, solution_for
from remat.planning.targets import Targets, best_within
from remat.planning.user_plan import PlanOrSchedule
from remat.report.readable_plan import ReadablePlan
from remat_exec import Runnable, get_executor
from remat_graph import Graph, Schedule, Solution
from remat_graph.torch import Capture
from remat_solvers import BudgetTooSmall

__all__ = ["RunnablePlan", "Task"]

_BRIEF_SECONDS, _BRIEF_SHARE = 5.0, 1 / 6  # of a limit
_ABOUT = 1.005  # times what the fastest program took within a higher target


@dataclass(frozen=True, slots=True)
class RunnablePlan:
    """A plan together with what runs it; its steps see whether the outputs `watched` are read."""

    plan: ReadablePlan
    capture: Capture
    executable: Runnable
    watched: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be planned for within a budget; `user_plan` and its `schedule` are tried alone.

    `plain` is plain autograd's peak, `whole_time` that of computing everything once and nothing in
    slices. `schedules` are of other sizes. `is_sure` says that the gradients which the capture
    expects come. With `share`, other ranks plan for the same. If it `is_last`, no other way is
    tried. One that `gives_way` is not looked for long, if nobody said for how long.
    """

    settings: Settings
    offered: Capture
    budget: int
    plain: int | None
    whole_time: float
    capture_seconds: float
    user_plan: PlanOrSchedule | None
    schedule: Schedule | None
    schedules: Sequence[Schedule]
    is_sure: bool
    has_measured_loss: bool
    share: bool
    is_last: bool
    gives_way: bool

    def solved(
        self, targets: Targets, captured: Capture, before: Solution | None = None
    ) -> tuple[Capture, Solution]:
        """Find a schedule that takes no more than its target, and the program that it is for.

        `captured` is the program of the plan before. It alone is solved if it is about as fast as
        the solution `before`, the fastest for a higher target: no program is faster within less.

        Raises:
            BudgetTooSmall: if none was found.
            BudgetExceeded: if the user's plan takes more.
        """
        offered = self.offered
        if self.user_plan is not None and self.schedule is not None:
            return offered, self.user_plan.solution(
                offered.graph, self.schedule, targets.of(offered), self.budget
            )
        solution = adapted(captured.graph, targets.of(captured), self.schedules)
        if solution is None and before is not None and captured is not offered:
            solution = self._about_as_fast(targets, captured, before)
        if solution is None:
            captured, solution = best_within(
                targets, offered, self._solve_for, self._solve_briefly_for,
                gives_way=self.gives_way and self.settings.limit_seconds is None,
            )  # fmt: skip
        schedule, asked = solution.schedule, str(self.settings.budget)
        if self.share and schedule is not None:
            target = targets.of(captured)
            return with_schedule_of_first_rank(offered, captured, solution, schedule, asked, target)
        return captured, solution

    def _about_as_fast(
        self, targets: Targets, captured: Capture, before: Solution
    ) -> Solution | None:
        with contextlib.suppress(BudgetTooSmall):
            solution = self._solve_for(targets.of(captured))(captured.graph)
            if solution.time <= before.time * _ABOUT:
                return solution
        return None

    def _solve_for(
        self, target: int, limit_seconds: float | None = None
    ) -> Callable[[Graph], Solution]:
        settings = self.settings
        limit = settings.limit_seconds if limit_seconds is None else limit_seconds
        return functools.partial(
            solution_for, budget=self.budget, target=target, solver=settings.solver,
            limit_seconds=limit, progress=settings.progress,
            keep_best=settings.keep_best, partitioner=settings.partitioner,
        )  # fmt: skip

    def _solve_briefly_for(self, target: int) -> Callable[[Graph], Solution] | None:
        """Give what solves in a part of the time; `None` if a solver was asked for by its name."""
        if self.settings.solver != "auto":
            return None
        limit = self.settings.limit_seconds
        brief = _BRIEF_SECONDS if limit is None else limit * _BRIEF_SHARE
        return self._solve_for(target, brief)

    def tries_least(self, named_bytes: int, rehearsed: int) -> bool:
        """Whether what takes the least is run before it is named: predictions may be wrong.

        They were where plans took more when they were `rehearsed`, and may be by estimated costs.
        """
        is_known = self.settings.costs == "measure" and not rehearsed
        return not is_known and has_room_for_plain(named_bytes, self.offered.program.device)

    def least(self, targets: Targets, refusal: BudgetTooSmall | None) -> tuple[Capture, Solution]:
        """Find what takes the least, where these targets are refused; solve for that if need be.

        It is the very schedule that was refused with, for others of its peak may take more when
        they run.

        Raises:
            BudgetTooSmall: if a solver that is named does not find it again.
        """
        offered = self.offered
        if refusal is None:
            try:
                return self.solved(targets, offered)
            except BudgetTooSmall as error:
                refusal = error
        raised = targets.raised(refusal.smallest_bytes - self.budget)
        for each in (*whole_programs(offered), *sliced_programs(offered, raised.eager)):
            schedule = None if self.share else smallest_known(each.graph)
            known = () if schedule is None else (schedule,)
            solution = adapted(each.graph, raised.of(each), known)
            if solution is not None:
                return each, solution
        return self.solved(raised, offered)

    def refusal(
        self, error: BudgetTooSmall, targets: Targets, named_bytes: int | None = None
    ) -> BudgetTooSmall:
        """Say that no schedule takes so little, with a bound on every plan; name what is enough.

        What else would do is looked for only if no other way is tried.
        """
        offered, target = self.offered, targets.eager
        refused = with_certain_bound(
            error, *whole_programs(offered), *sliced_programs(offered, target),
            named_bytes=named_bytes or error.smallest_bytes,
            sure=self.is_sure, measured_loss=self.has_measured_loss,
        )  # fmt: skip
        if not self.is_last:
            return refused
        limit = self.settings.limit_seconds
        brief = _BRIEF_SECONDS if limit is None else min(limit, _BRIEF_SECONDS)
        if self.settings.numerics is None:
            note_what_slices_reach(refused, offered, self._solve_for(target, brief))
        note_what_loss_reads(refused, offered)
        return refused

    def planned(self, captured: Capture, solution: Solution) -> RunnablePlan:
        """Make what runs a schedule, and the plan that says so."""
        schedule = solution.schedule
        if schedule is None:
            raise RematError(f"solver {solution.solver} returned no schedule")
        captured.compile_groups()
        kernels = self.settings.kernels
        can_compile = self.settings.runs_groups_on(captured.program.device)
        executor = get_executor(self.settings.executor)
        executable = executor(captured, schedule, budget_bytes=self.budget)
        plan = readable_plan(
            captured,
            solution,
            self.budget,
            plain_peak_bytes=self.plain,
            capture_seconds=self.capture_seconds,
            whole_time=self.whole_time,
            source=executable.source,
            no_groups=why_no_groups(kernels, self.offered, captured, can_compile=can_compile),
        )
        return RunnablePlan(plan, captured, executable)
