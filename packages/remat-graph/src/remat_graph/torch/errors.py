"""What capture raises."""

from __future__ import annotations

from remat_graph.errors import GraphError, RematError

__all__ = [
    "BrokenCapture",
    "CaptureError",
    "DuplicateCapture",
    "MeasurementError",
    "NoBackward",
    "UnknownCapture",
]


class CaptureError(GraphError):
    """A model, or its example inputs, that cannot be captured as one training graph."""


class NoBackward(CaptureError):
    """Nothing that is returned depends on a tensor that requires a gradient."""


class UnknownCapture(CaptureError):
    """No installed distribution offers a capture of this name."""


class DuplicateCapture(CaptureError):
    """Two distributions offer a capture of the same name."""


class BrokenCapture(CaptureError):
    """A capture that cannot be loaded, or takes other arguments than a `Capturer`."""


class MeasurementError(RematError, RuntimeError):
    """Memory that cannot be measured: a profiler is running in this thread already."""
