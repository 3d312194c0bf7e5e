"""Blocks that do the same: a few are traced, and the program of all is made of theirs."""
