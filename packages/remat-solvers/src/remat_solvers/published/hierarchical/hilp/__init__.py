"""H-ILP: the integer program for levels of a hierarchy.

`columns` and `formulation` write the program of one level, `search` solves it within one budget,
`planner` plans the levels below the top, `solver` puts these together.
"""

from remat_solvers.published.hierarchical.hilp.solver import HILP, RKCheckmate

__all__ = ["HILP", "RKCheckmate"]
