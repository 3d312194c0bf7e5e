"""`rk-rotor`: rotor over a chain of blocks, each of which may be recorded in several ways.

Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont: "Rockmate: an Efficient, Fast, Automatic and
Generic Tool for Re-materialization in PyTorch" (ICML 2023); HiRemate, section 3.2 and C.1.3, has it
among its solvers. The stages of the chain are planned as blocks (`options`), and rotor's
dynamic programme chooses for every record one of the schedules of the stage (`program`, C2).

Guarantee: never over budget; never slower than `rotor` with the same slots, whose plan is made
first, as far as the limit gives it time. With one option, to store everything inside, the two are
equal. Like rotor's, its answers are no bounds for other schedules; it claims none but that
nothing is faster than computing every op once.
Complexity: that of rotor twice, plus O(stages^2 * options * slots), plus some small programs per
kind of stage.
Limits: those of rotor; options are schedules of single stages, planned without regard to the budget
of the whole. Those of each chain take up to half of the time that is left, the finest chain first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat_graph import Solution
from remat_solvers.chains.costs import measure_stages
from remat_solvers.chains.search import DEFAULT_SECONDS
from remat_solvers.core.problem import Limit, Problem, Report, check_whole
from remat_solvers.published.hierarchical.blocks.bottom_up import Planner
from remat_solvers.published.hierarchical.hilp.planner import LevelPlanner
from remat_solvers.published.hierarchical.rk_rotor.options import StagePlans
from remat_solvers.published.rotor import Rotor

__all__ = ["RKRotor"]

_BLOCKS_SHARE = 0.5
_PLANNER = LevelPlanner()


@dataclass(frozen=True)
class RKRotor(Rotor):
    """rotor with up to `most_options` schedules per stage, found by `planner`.

    Raises:
        InvalidProblem: if `slots`, `most_stages` or `most_options` is no whole number of 1 or more.
    """

    name: ClassVar[str] = "rk-rotor"
    citation: ClassVar[str] = (
        "Xunyi Zhao, Théotime Le Hellard, Lionel Eyraud-Dubois, Julia Gusak, Olivier Beaumont. "
        "Rockmate: an Efficient, Fast, Automatic and Generic Tool for Re-materialization in "
        "PyTorch. ICML 2023."
    )

    most_options: int = 16
    planner: Planner = _PLANNER

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("most_options", self.most_options)

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Plan like rotor, then with options; `LIMIT` if nothing fits, or at the limit (30 s)."""
        search, chains = self._searched(problem, limit, report)
        wiring = search.wiring
        plans = StagePlans(wiring, self.planner, self.most_options, problem.executor)
        for chain in chains:
            left = limit.left(DEFAULT_SECONDS)
            if search.closed() or left == 0:
                break
            options = plans.of(chain, _BLOCKS_SHARE * left)
            search.say(f"options of {len(chain.stages)} stages")
            search.fill(measure_stages(wiring, chain, options), self.slots)
        return search.solution()
