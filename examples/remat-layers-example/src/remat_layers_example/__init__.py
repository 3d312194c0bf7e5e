"""`counted` and `logged`: a capture and an executor for `remat`, made of the built-in ones."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat_exec import Executable
from remat_graph.torch import Capture, Costs, RealStrides, capture_region

__all__ = ["Logged", "counted"]

logger = logging.getLogger(__name__)


def counted(
    region: Callable[..., Any],
    inputs: Sequence[Any],
    /,
    *,
    costs: Costs = "measure",
    loss_alone: bool = True,
    real: RealStrides | None = None,
) -> Capture:
    """Capture a region as `aot` does, and log how many operations of each stage it has."""
    captured = capture_region(region, inputs, costs=costs, loss_alone=loss_alone, real=real)
    stages = Counter(op.stage.value for op in captured.graph.ops)
    logger.info("captured %s", ", ".join(f"{n} {stage}" for stage, n in sorted(stages.items())))
    return captured


class Logged(Executable):
    """Run a plan as `generated` does, and log each half and what is kept in between."""

    def __call__(
        self,
        module: torch.nn.Module,
        tensors: list[torch.Tensor],
        started: Callable[[frozenset[int], frozenset[int]], None] | None = None,
        *others: Any,
        **told: Any,
    ) -> list[torch.Tensor]:
        def on_start(missing: frozenset[int], released_outputs: frozenset[int]) -> None:
            logger.info("backward, with %d bytes kept", self.kept_bytes)
            if started is not None:
                started(missing, released_outputs)

        logger.info("forward")
        return super().__call__(module, tensors, on_start, *others, **told)

    @property
    def kept_bytes(self) -> int:
        graph, storage = self.capture.graph, self.capture.program.storage
        kept = {storage[name] for name in self.code.saved if name in storage} - graph.resident
        return sum(value.size_bytes for value in graph.values if value.name in kept)
