"""`h-tw-remat`: TW-Remat inside a hierarchy.

The recursion of `tw_remat` is run on each kind of block, with the rest of the step as one op
(`blocks.closed`), then on the top level, whose nodes are ops and halves of blocks. What a sweep
over its limit k finds for a block are its options. A level with smaller blocks is a plain graph
once an option is chosen for each of them (`blocks.compose`); that is done for some selections, at
rising prices of a saved byte. Sequences of nodes are expanded to ops, and recomputations that the
budget does not need are taken out. So the decompositions are of small graphs only, and identical
blocks are decomposed once. Many are planned at a time if there is an executor.

Guarantee: a schedule within the budget, or `LIMIT`; `INFEASIBLE` only where a single op needs more.
Complexity: that of the recursion on graphs of the size of a level, for each kind of block, budget
and selection. Limits: those of `tw_remat`, on the order of first computations and on what is not
replayable; backward halves are run once.
Source: Gusak et al. 2024, "HiRemate", section 3.2 (H-TWRemat); Kumar et al. 2019.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from remat_graph import Solution
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.attempt import Attempt
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Report, check_whole
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Ints
from remat_solvers.errors import InvalidProblem
from remat_solvers.published.decompositions.decomposition import Precedence
from remat_solvers.published.decompositions.recursion import sequences
from remat_solvers.published.decompositions.tw_remat import TreeRecursion
from remat_solvers.published.hierarchical.blocks.bottom_up import Blocks
from remat_solvers.published.hierarchical.blocks.compose import (
    compose,
    expand_nodes,
    picks_of,
    selections,
)
from remat_solvers.published.hierarchical.blocks.level import Level
from remat_solvers.search.prune import prune

__all__ = ["HTWRemat", "sequences_within"]

_BLOCKS_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class HTWRemat(PlainSolver):
    """TW-Remat over the hierarchy of the problem.

    `most_options` is shared out among the blocks of a level. The top level is swept several times:
    the smallest blocks are dissolved into it while it has at most so many nodes as `most_nodes`
    says, for each number there.

    Raises:
        InvalidProblem: if `most_options` or one of `most_nodes` is no whole number of 1 or more, or
            there is none.
    """

    name: ClassVar[str] = "h-tw-remat"
    needs_hierarchy: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "Ravi Kumar, Manish Purohit, Zoya Svitkina, Erik Vee, Joshua R. Wang: "
        "Efficient Rematerialization for Deep Networks. NeurIPS 2019. "
        "J. Gusak, X. Zhao, T. Le Hellard, Z. Li, L. Eyraud-Dubois, O. Beaumont: HiRemate: "
        "Hierarchical Approach for Efficient Re-materialization of Neural Networks. 2024."
    )

    most_options: int = 40
    most_nodes: tuple[int, ...] = (1, 28, 60)

    def __post_init__(self) -> None:
        check_whole("most_options", self.most_options)
        if not isinstance(self.most_nodes, tuple) or not self.most_nodes:
            raise InvalidProblem(f"most_nodes={self.most_nodes!r}; give a tuple of whole numbers")
        for most in self.most_nodes:
            check_whole("most_nodes", most)

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Plan the blocks, then the top, until the limit is reached (60 s if none is set)."""
        if problem.hierarchy is None:
            raise InvalidProblem(f"{self.name} needs a hierarchy")
        attempt = Attempt(self.name, problem, limit, report)
        until = attempt.deadline - (1 - _BLOCKS_SHARE) * attempt.left()
        if attempt.settled_at_once(peak_bound(attempt.wiring, any_order=True).peak_bytes):
            return attempt.solution()
        blocks = Blocks(problem.hierarchy, self.most_options)
        blocks.plan(_fitting, problem.executor, until, attempt.say)
        tops = {len(top.nodes): top for top in map(blocks.top, self.most_nodes)}
        for nodes, top in tops.items():
            for sequence in sequences_within(top, problem.budget_bytes, attempt.deadline):
                attempt.offer(trace(attempt.wiring, sequence))
            attempt.say(f"swept over a top level of {nodes} nodes")
        return attempt.solution()


def _fitting(level: Level, budget_bytes: int, seconds: float) -> list[Ints]:
    """Find the sequences of a level within the budget; a `Planner` of `blocks.bottom_up`."""
    fitting = sequences_within(level, budget_bytes, time.perf_counter() + seconds)
    return sorted(fitting, key=lambda sequence: -sequence_time(level.wiring, sequence))


def sequences_within(level: Level, budget_bytes: int, deadline: float) -> Iterator[Ints]:
    """Yield what the recursion finds within the budget, for one selection of options after another.

    At `deadline` of `time.perf_counter` it still takes the first k of the first selection.
    """
    wiring = level.wiring
    for selection in selections(level):
        composed = compose(level, selection)
        recursion = TreeRecursion(Precedence.of(composed))
        for _, nodes in sequences(composed, recursion, deadline):
            ops = expand_nodes(level, picks_of(level, selection, nodes.tolist()))
            now = prune(wiring, trace(wiring, np.array(ops, dtype=np.int64)), budget_bytes)
            if now.peak_bytes <= budget_bytes:
                yield now.sequence
        if time.perf_counter() > deadline:
            return
