"""What capture raises."""

from __future__ import annotations

from remat_graph.errors import GraphError

__all__ = ["CaptureError", "GuardMiss", "NoBackward"]


class CaptureError(GraphError):
    """A model, or its example inputs, that cannot be captured as one training graph."""


class GuardMiss(GraphError):
    """A call that differs from what a capture specialised on; capture again for it."""


class NoBackward(CaptureError):
    """Nothing that is returned depends on a tensor that requires a gradient."""
