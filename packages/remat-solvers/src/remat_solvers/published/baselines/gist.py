"""`gist`: what the backward half reads is kept packed, wherever it can be; nothing is recomputed.

Each backward op is the one for which least of the forward half is kept, packed copies counted at
their size, what other backward ops read in any case at nothing. Each value that can be unpacked is
kept packed, in its smallest copy, and unpacked where the backward half first reads it. On graphs of
PyTorch programs with their alternatives these are Gist's *binarize* (a bit for each element of a
ReLU before a pooling, offsets within the windows of a max-pooling), its *inplace* (a ReLU's
backward that reads the output, which a convolution reads in any case), and with `Numerics.LOSSY`
its *delayed precision reduction* (copies in 16 bits between the halves).

Guarantee: none. Complexity: linear. Limits: one schedule whatever the budget; on a graph without
alternatives that of storing everything.
Left out: *sparse storage, dense compute* for ReLU before a convolution, as its size depends on the
data, and formats of 8 and 10 bits; the 16 bits are bfloat16. Convolution backwards are not halved.
Source: Jain et al. 2018, "Gist: Efficient Data Encoding for Deep Neural Network Training", as
described and measured in MONeT (Shah et al. 2021), appendix E.
"""

from __future__ import annotations

from typing import ClassVar

from remat_graph import Solution
from remat_solvers.core.alternatives import Alternatives
from remat_solvers.core.dead_runs import drop_dead_runs
from remat_solvers.core.incumbent import Incumbent
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Report
from remat_solvers.search.selection import arrange, least_kept

__all__ = ["Gist"]


class Gist(PlainSolver):
    """Keep everything packed; compute nothing again."""

    name: ClassVar[str] = "gist"
    takes_alternatives: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "A. Jain, A. Phanishayee, J. Mars, L. Tang, G. Pekhimenko: "
        "Gist: Efficient Data Encoding for Deep Neural Network Training. ISCA 2018."
    )

    def can_solve(self, problem: Problem) -> str | None:
        """Take any problem."""
        return None

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Schedule the one choice there is."""
        wiring = problem.wiring
        alternatives = Alternatives.of(wiring)
        kept = Incumbent(self.name, wiring, problem.budget_bytes, limit, report, bounded=False)
        arranged = arrange(wiring, alternatives, least_kept(wiring, alternatives))
        if arranged is None:
            kept.say("what reads packed copies cannot run in this order")
            return kept.solution()
        stored = drop_dead_runs(wiring, arranged)
        fits = kept.offer(stored)
        kept.say("fits" if fits else f"needs {stored.peak_bytes} bytes")
        return kept.solution()
