"""Blocks of a hierarchy as the hierarchical solvers see them.

`closed` makes a block a training graph of its own, `targets` says for which budgets to plan it,
`options` reads and picks options, `runs` measures them, `level` puts ops and blocks in an order,
`compose` turns a level into a plain graph, and `bottom_up` works from the bottom up.
"""
