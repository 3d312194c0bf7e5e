"""Chains of blocks: the fastest schedules of whole blocks, by the dynamic programme of rotor.

`chain` finds the blocks, `costs` measures them, `program` chooses, and `search` repeats that for
chains and numbers of slots. `rotor` and `rk-rotor` (`published`) are this; `refine` plans by it a
graph that is a chain.
"""
