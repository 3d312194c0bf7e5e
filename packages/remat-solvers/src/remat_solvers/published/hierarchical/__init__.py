"""Solvers that plan a hierarchy block by block, each kind of block once.

`blocks` is how all of them see a hierarchy; `hilp`, `rk_rotor` and `h_tw_remat` are the solvers.
"""
