"""Captures of a region whose sizes change from call to call: traced once, evaluated for each call.

TorchDynamo makes a size that has changed a symbol. The first size of such a graph is traced as it
is: a trace with symbols takes two to three times as long, and where there is but one other size, as
that of the last batch of an epoch, it would serve for nothing. At the next size the graph is traced
with symbols; a call for which that trace does not hold is traced anew, with symbols too. Where
torch fails with them, each size is traced as it comes.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from remat_graph.torch import (
    Capture,
    CaptureError,
    Costs,
    NoBackward,
    OtherSizes,
    RealStrides,
    SizedCapture,
    SizedRegion,
    has_sizes,
    trace_sizes,
)

__all__ = ["SizedCaptures"]

logger = logging.getLogger(__name__)

_MOST_TRACES = 8  # with symbols, of one graph


class SizedCaptures:
    """The traces with symbols of one graph that TorchDynamo found, and what they give for calls."""

    def __init__(self, graph: torch.fx.GraphModule, name: str) -> None:
        self._graph = graph
        self._name = name
        self._traces: list[SizedRegion] = []
        self._captures: dict[tuple[SizedRegion, bool], SizedCapture] = {}
        self._can_trace = has_sizes(graph)
        self._first: Hashable = None

    def capture(
        self,
        inputs: Sequence[Any],
        sizes: Hashable,
        *,
        costs: Costs,
        loss_alone: bool,
        real: RealStrides | None,
    ) -> Capture | None:
        """Capture a call of these sizes; `None` if it is to be traced as it comes.

        All else is as for `capture_region`.

        Raises:
            NoBackward: if nothing that it returns depends on what requires a gradient.
        """
        options: dict[str, Any] = {"costs": costs, "loss_alone": loss_alone, "real": real}
        for trace in self._traces:
            near = self._captures.get((trace, loss_alone))
            call = None if near is None else trace.sizes_of(inputs)
            read_off = None if near is None or call is None else near.at(call)
            if read_off is not None:
                return read_off
            try:
                return self._kept(trace, trace.capture(inputs, **options), loss_alone=loss_alone)
            except OtherSizes as error:
                logger.debug("%s: %s", self._name, error)
        self._first = sizes if self._first is None else self._first
        if not self._can_trace or sizes == self._first:
            return None
        try:
            trace = trace_sizes(self._graph, inputs)
            capture = trace.capture(inputs, **options)
        except NoBackward:
            raise
        except CaptureError as error:
            self._give_up(f"it cannot be traced with symbols for its sizes: {error}")
            return None
        self._traces.append(trace)
        self._kept(trace, capture, loss_alone=loss_alone)
        if len(self._traces) == _MOST_TRACES:
            self._give_up("what torch decided on sizes as it traced held for few of them each time")
        return capture

    def _kept(self, trace: SizedRegion, capture: SizedCapture, *, loss_alone: bool) -> SizedCapture:
        """Keep a capture, off which those of other sizes are read."""
        self._captures.setdefault((trace, loss_alone), capture)
        return capture

    def _give_up(self, reason: str) -> None:
        self._can_trace = False
        logger.warning("%s is traced anew for each new size: %s", self._name, reason)
