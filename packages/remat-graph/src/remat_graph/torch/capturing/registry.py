"""Captures by name, found through the entry-point group `remat.captures`.

Listing imports nothing, so a broken plugin never breaks it; a capture is loaded when first asked
for and kept. A name offered twice is an error that names both distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from remat_graph.plugins import Plugin, Registry
from remat_graph.torch.capturing.capture import capture_region
from remat_graph.torch.capturing.captures import Capture, Costs
from remat_graph.torch.cost.strides import RealStrides
from remat_graph.torch.errors import BrokenCapture, DuplicateCapture, UnknownCapture

__all__ = ["Capturer", "get_capture", "list_captures"]

_REGISTRY = Registry(
    "remat.captures", "capture", "aot", UnknownCapture, DuplicateCapture, BrokenCapture
)


class Capturer(Protocol):
    """Turns a region and example inputs into a training graph, and the program behind it.

    `capture_region` is one; its docstring says what the arguments mean.
    """

    def __call__(
        self,
        region: Callable[..., Any],
        inputs: Sequence[Any],
        /,
        *,
        costs: Costs = "measure",
        loss_alone: bool = True,
        real: RealStrides | None = None,
    ) -> Capture:
        """Capture a function of a flat list of inputs.

        Raises:
            NoBackward: if nothing that is returned depends on a tensor that requires a gradient.
            CaptureError: if it is no static graph, or an operator cannot be measured.
        """
        ...


def list_captures() -> dict[str, Plugin]:
    """List the installed captures by name, without importing any.

    Raises:
        DuplicateCapture: if two distributions offer the same name.
    """
    return _REGISTRY.listed()


def get_capture(name: str) -> Capturer:
    """Load a capture; the same object every time.

    Raises:
        UnknownCapture: if none has this name.
        DuplicateCapture: if two distributions offer it.
        BrokenCapture: if it cannot be imported, or does not take the arguments of a `Capturer`.
    """
    loaded = _REGISTRY.load(name, None, (), costs="estimate", loss_alone=True, real=None)
    return cast(Capturer, loaded)


if TYPE_CHECKING:
    _built_in: Capturer = capture_region
