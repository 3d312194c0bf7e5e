"""`rotor`: the optimal memory-persistent schedule of a chain of blocks.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for heterogeneous chains:
how to train deep neural networks with limited memory" (Inria RR-9302, 2019), and the slides "rotor:
Rematerializing Optimally with pyTORch" (2021). The graph is cut into a chain, each stage is
measured, and a dynamic programme chooses (`chains`).

Guarantee: never over budget; the fastest of the schedules that run whole stages of the chain, that
keep a stored input or record until the backward of its stage and held values until their last use,
and whose memory, rounded up to slots, fits. It is no bound for other schedules (of parts of stages,
or not persistent), so none is claimed, except that nothing is faster than computing every op once.
Where a carried value is held too (a result), the programme does not see that a recomputation could
start from it, and what it recomputes in vain is left out afterwards. How a stage runs is a little
better than in the paper: a later run leaves out ops that lead to nothing needed, and values are
given up op by op.
Complexity: O(stages^3 * slots); chains of more than `most_stages` stages are merged to that number.
Limits: cuts are looked for in execution order; where that gives several chains, each is tried. What
is not replayable runs once; its outputs are held until their last use, like results and masks. If
the backward ops of the stages alternate in the graph, they are computed stage by stage, which is
another order of first computations than the graph's. Rounding costs up to a slot per stored input
or record, so more slots are tried too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat_graph import Solution
from remat_solvers.chains.chain import Chain, find_chains, merged
from remat_solvers.chains.costs import measure_stages
from remat_solvers.chains.search import MOST_STAGES, SLOTS, ChainSearch
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Report, check_whole
from remat_solvers.errors import UnsuitableSolver

__all__ = ["Rotor"]


@dataclass(frozen=True)
class Rotor(PlainSolver):
    """The dynamic programme of rotor; `slots` of memory, at most `most_stages` stages.

    Raises:
        InvalidProblem: if one of the two is no whole number of 1 or more.
    """

    name: ClassVar[str] = "rotor"
    citation: ClassVar[str] = (
        "Olivier Beaumont, Lionel Eyraud-Dubois, Julien Herrmann, Alexis Joly, Alena Shilova. "
        "Optimal checkpointing for heterogeneous chains: how to train deep neural networks with "
        "limited memory. Inria Research Report RR-9302, 2019."
    )

    slots: int = SLOTS
    most_stages: int = MOST_STAGES

    def __post_init__(self) -> None:
        check_whole("slots", self.slots)
        check_whole("most_stages", self.most_stages)

    def can_solve(self, problem: Problem) -> str | None:
        """Take chains of blocks; say where a graph is none."""
        chains = find_chains(problem.wiring)
        return chains if isinstance(chains, str) else None

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Fill the tables; `LIMIT` if no schedule of this kind fits, or at the limit (30 s)."""
        return self._searched(problem, limit, report)[0].solution()

    def _searched(
        self, problem: Problem, limit: Limit, report: Report
    ) -> tuple[ChainSearch, list[Chain]]:
        """Try each chain, merged to `most_stages` stages."""
        wiring = problem.wiring
        chains = find_chains(wiring)
        if isinstance(chains, str):
            raise UnsuitableSolver(self.name, chains)
        merged_chains = [merged(wiring, chain, self.most_stages) for chain in chains]
        search = ChainSearch(self.name, problem, limit, report)
        for chain in merged_chains:
            search.fill(measure_stages(wiring, chain), self.slots)
        return search, merged_chains
