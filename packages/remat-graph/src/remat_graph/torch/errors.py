"""What capture raises."""

from __future__ import annotations

from remat_graph.errors import GraphError

__all__ = ["CaptureError", "NoBackward"]


class CaptureError(GraphError):
    """A model, or its example inputs, that cannot be captured as one training graph."""


class NoBackward(CaptureError):
    """Nothing that is returned depends on a tensor that requires a gradient."""
