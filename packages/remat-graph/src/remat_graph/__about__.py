"""Version of `remat-graph`, read by its build."""

__version__ = "0.1.0"
