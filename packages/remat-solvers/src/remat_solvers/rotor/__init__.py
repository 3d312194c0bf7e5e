"""rotor: chains of blocks by an exact dynamic programme.

`chain` finds the blocks, `costs` measures them, `program` chooses, `solver` puts these together.
"""

from remat_solvers.rotor.solver import Rotor

__all__ = ["Rotor"]
