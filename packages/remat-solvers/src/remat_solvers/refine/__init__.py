"""The stage-refined ILP: near-optimal schedules with a certified bound, for graphs of 1,000 ops.

`relaxation` writes the program, `point` goes between its points and sequences, `construct` builds a
schedule of what a point says, `refinements` finds where to refine the program. Of a solve, `state`
is how it stands, `heuristics` and its `neighbourhood` look for schedules without a proof,
`programs` writes and solves programs, `rounds` decides what comes when, `solver` is the door.
"""

from remat_solvers.refine.solver import Refine

__all__ = ["Refine"]
