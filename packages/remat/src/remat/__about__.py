"""Version of `remat`, read by its build."""

__version__ = "0.1.0"
