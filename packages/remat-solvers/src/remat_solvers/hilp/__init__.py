"""H-ILP: the integer program for levels of a hierarchy.

`formulation` writes the program of one level, `search` solves it within one budget, `planner` plans
the levels below the top, `solver` puts these together.
"""

from remat_solvers.hilp.solver import HILP, RKCheckmate

__all__ = ["HILP", "RKCheckmate"]
