"""Graphs to solve, and the truth about small ones."""

NO_LIMIT = 3600.0  # seconds, for what ends by itself: how soon says nothing but how fast it runs
