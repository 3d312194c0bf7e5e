"""Checkmate: the integer program over frontier-advancing stages, and its two-phase rounding.

`stages` lays a graph out in stages, `formulation` writes the program, `bound` one that bounds all
schedules in the order of the graph, `solver` solves both, `rounding` rounds the linear relaxation.
"""

from remat_solvers.published.checkmate.formulation import Form
from remat_solvers.published.checkmate.rounding import CheckmateRounding
from remat_solvers.published.checkmate.solver import Checkmate

__all__ = ["Checkmate", "CheckmateRounding", "Form"]
