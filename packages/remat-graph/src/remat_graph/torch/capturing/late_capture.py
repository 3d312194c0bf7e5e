"""A capture that was read off another: its graph is made when it is first read.

A call of a new size is planned by sizes alone, in about a millisecond. Its graph takes several,
and serves who reads the plan, or runs another backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, cast

from remat_graph.graph import Graph
from remat_graph.torch.calls import allocated_bytes
from remat_graph.torch.capturing.captures import Capture
from remat_graph.torch.program import KEPT_BY_LOSS, LossCost

__all__ = ["LateCapture"]


@dataclass(frozen=True)
class LateCapture(Capture):
    """A capture whose graph may not be there yet. What `outline` says is known without it."""

    def _later(
        self, graph: Callable[[], Graph], outline: Graph | None = None, **changes: Any
    ) -> Self:
        """Give the same with a graph that is made when it is first read.

        That has the ops and values of this one, or of an `outline`.
        """
        other, own = object.__new__(type(self)), vars(self)
        kept = {each.name: own[each.name] for each in fields(self) if each.name in own}
        kept.pop("graph", None)
        vars(other).update(kept, **changes, _make_graph=graph, _outline=outline or self.outline)
        return other

    @property
    def outline(self) -> Graph:
        """A graph with the ops and values of this one, whose sizes and times may be others."""
        own = vars(self)
        return self.graph if "graph" in own else cast("Graph", own["_outline"])

    def size_of(self, value: str) -> int:
        """Give the bytes of a value of the graph; none if it has no such value."""
        if "graph" in vars(self):
            return super().size_of(value)
        if value == KEPT_BY_LOSS:
            return self.loss.kept_bytes
        if value not in self.outline.value_by_name:
            return 0
        return allocated_bytes(self.program.facts[value], self.program.device)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            make = vars(self).get("_make_graph")
            if name != "graph" or make is None:
                raise AttributeError(f"{type(self).__name__} has no {name}")
            vars(self)["graph"] = graph = make()
            return graph

    def _graph_later(self) -> Graph:
        return self.graph

    def with_loss(self, loss: LossCost) -> Self:
        """Plan for a loss outside the module that takes this much."""
        if loss == self.loss or "graph" in vars(self):
            return cast("Self", super().with_loss(loss))
        return self._later(lambda: Capture.with_loss(self, loss).graph, loss=loss)

    def with_released_outputs(self, positions: frozenset[int]) -> Self:
        """Plan for outputs that the user holds no more when the backward starts."""
        if positions == self.released_outputs or "graph" in vars(self):
            return cast("Self", super().with_released_outputs(positions))
        return self._later(
            lambda: Capture.with_released_outputs(self, positions).graph,
            released_outputs=positions,
        )
