"""Graphs to solve, and the truth about small ones."""
