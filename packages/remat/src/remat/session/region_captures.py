"""Captures of regions: what is planned for, traced once for each call of another kind.

An LSTM that eager runs by oneDNN's layers is traced by them. Each keeps a workspace that is larger
than what its steps keep: where no plan fits so, a call is captured once more, in steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat.planning.settings import Settings
from remat.session.region import Region, keep
from remat_graph.torch import (
    Capture,
    Cost,
    Costs,
    RealStrides,
    capture_region,
    get_capture,
    quietly,
)

__all__ = ["RegionCaptures"]


class RegionCaptures:
    """Gives the captures of regions; `costs` are what operators were measured to cost."""

    def __init__(self, settings: Settings, costs: dict[str, Cost]) -> None:
        self._settings, self._costs = settings, costs
        self.measures = settings.costs == "measure"
        self._capture_region = get_capture(settings.capture)
        self._real_strides = RealStrides()  # what is estimated runs, too

    @property
    def _first_costs(self) -> Costs:
        """With which a graph is captured, before it is known whether it must be measured."""
        return "estimate" if self.measures else self._settings.costs

    def of(self, region: Region, inputs: Sequence[Any], *, loss_alone: bool = True) -> Capture:
        """Give the graph of a call: traced once, whatever is planned for."""
        numbers = region.numbers(inputs)
        in_steps = numbers in region.calls_in_steps
        key = (loss_alone, in_steps, *numbers)
        capture = region.captures.get(key)
        if capture is None:
            with region.refused.seen(numbers), quietly():  # the original has warned of the same
                options: dict[str, Any] = {
                    "costs": self._first_costs, "loss_alone": loss_alone, "real": self._real_strides
                }  # fmt: skip
                if in_steps:  # of which each length is another graph
                    options["lstms_in_steps"] = True
                elif self._capture_region is capture_region:
                    capture = region.sized.capture(inputs, numbers, **options)
                capture = capture or self._capture_region(region.graph, inputs, **options)
                numerics = self._settings.numerics
                if loss_alone and numerics is not None:
                    measured = self._costs if self.measures else None
                    capture = capture.with_alternatives(numerics, measured=measured)
            keep(region.captures, key, capture)
        return capture

    def switch_to_steps(self, region: Region, inputs: Sequence[Any]) -> bool:
        """Capture a call with its LSTMs in steps from now on; say whether it had them in layers."""
        numbers = region.numbers(inputs)
        is_own = self._capture_region is capture_region
        if not is_own or numbers in region.calls_in_steps:
            return False
        if not self.of(region, inputs).has_lstm_layers:
            return False
        region.calls_in_steps.add(numbers)
        return True
