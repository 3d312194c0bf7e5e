"""What `remat_graph` raises: each says what happened, with which value, and what would work."""

from __future__ import annotations

__all__ = ["DocumentError", "GraphError", "InvalidGraph", "InvalidSchedule", "RematError"]


class RematError(Exception):
    """Base of the errors of all packages of remat."""


class GraphError(RematError, ValueError):
    """Base of the errors of this package."""


class InvalidGraph(GraphError):
    """A graph or hierarchy that breaks one of the rules of its type."""


class InvalidSchedule(GraphError):
    """A schedule that cannot be run on its graph.

    `step` is the index of the offending step, or `None` if the fault is in the schedule as a whole.
    """

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message if step is None else f"step {step}: {message}")
        self.step = step


class DocumentError(GraphError):
    """A JSON document that is damaged, of another kind, or of a schema version unknown here."""
