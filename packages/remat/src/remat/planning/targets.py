"""What schedules of each kind of program may take, and the fastest one that does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from remat.planning.solving import Solve, either, solved_in_best_program
from remat_graph import Solution
from remat_graph.torch import Capture
from remat_solvers import BudgetTooSmall

__all__ = ["Targets", "best_within"]


@dataclass(frozen=True, slots=True)
class Targets:
    """The bytes that schedules may take: by eager kernels, and of programs of compiled groups."""

    eager: int
    grouped: int

    def of(self, program: Capture) -> int:
        """Give what schedules of a program may take."""
        return self.eager if program.unfused is None else self.grouped

    def at_most(self, target: int, program: Capture) -> Targets:
        """Lower them by what was seen of a program; groups say nothing of eager kernels."""
        if program.unfused is not None:
            return replace(self, grouped=target)
        return Targets(target, min(self.grouped, target))

    def raised(self, size: int) -> Targets:
        """Raise them; of groups that were given up nothing is planned any more."""
        return Targets(self.eager + size, self.grouped and self.grouped + size)


def best_within(
    targets: Targets,
    offered: Capture,
    solve_for: Callable[[int], Solve],
    solve_briefly_for: Callable[[int], Solve | None],
    *,
    gives_way: bool = False,
) -> tuple[Capture, Solution]:
    """Solve a capture as `solved_in_best_program` does; eager kernels may take more than groups.

    Raises:
        BudgetTooSmall: if it is for all programs.
    """
    programs = [offered] if targets.of(offered) else []
    if not programs or targets.of(offered) < targets.eager:
        programs.append(offered.without_groups())
    found, refusals = [], []
    for program in programs:
        target = targets.of(program)
        solvers = solve_for(target), solve_briefly_for(target)
        try:
            found.append(solved_in_best_program(program, target, *solvers, gives_way=gives_way))
        except BudgetTooSmall as error:
            refusals.append(error)
    if not found:
        raise functools.reduce(either, refusals)
    return min(found, key=lambda each: each[1].time)
