"""For those who write a solver: whether it does what it says, and what brute force finds."""

from remat_solvers.testing.brute_force import fastest
from remat_solvers.testing.solver_check import SolverCheck, SolverCheckFailed, check_solver

__all__ = ["SolverCheck", "SolverCheckFailed", "check_solver", "fastest"]
