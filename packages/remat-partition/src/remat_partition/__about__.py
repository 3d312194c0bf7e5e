"""Version of `remat-partition`, read by its build."""

__version__ = "0.1.0"
