"""MONeT: one integer program for what is kept, what runs again, and by which implementations.

`layout` reads a graph as MONeT sees it, `formulation` writes the program, `memory` its rows of
bytes, `point` goes between points and schedules, `solver` solves it.
"""

from remat_solvers.published.monet.solver import Monet

__all__ = ["Monet"]
