"""rk-rotor: rotor over blocks that have several schedules each.

`options` plans the blocks one by one, `solver` is rk-rotor; chains, costs and the programme are
those of `chains`.
"""

from remat_solvers.published.hierarchical.rk_rotor.solver import RKRotor

__all__ = ["RKRotor"]
