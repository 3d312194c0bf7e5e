"""Divide and conquer over tree and path decompositions of a graph.

`decomposition` makes them, `recursion` is what `tw_remat` and `pw_remat` share.
"""
