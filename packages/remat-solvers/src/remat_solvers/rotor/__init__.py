"""rotor and rk-rotor: chains of blocks by an exact dynamic programme.

`chain` finds the blocks, `options` plans them one by one, `costs` measures them, `program` chooses,
`search` repeats that for chains and numbers of slots; `solver` is rotor, `rk_solver` is rk-rotor.
"""

from remat_solvers.rotor.rk_solver import RKRotor
from remat_solvers.rotor.solver import Rotor

__all__ = ["RKRotor", "Rotor"]
