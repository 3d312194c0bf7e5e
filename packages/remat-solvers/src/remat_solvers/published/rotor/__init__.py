"""rotor: chains of blocks by an exact dynamic programme.

`chain` finds the blocks, `costs` measures them, `program` chooses, `search` repeats that for chains
and numbers of slots, and `solver` is rotor. `rk_rotor` plans the blocks one by one as well.
"""

from remat_solvers.published.rotor.solver import Rotor

__all__ = ["Rotor"]
