"""Where regions are cut, so that autograd has the whole gradient of an output."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import fx

from remat.dynamo.parts import GraphParts, cut_at
from remat.planning.user_plan import PlanOrSchedule, UserPlan

__all__ = ["Cuts"]

logger = logging.getLogger(__name__)


class Cuts:
    """Outputs at which regions are cut, by the names of regions: those of a plan, and those since.

    A name is that of graphs of any sizes: each of them is cut, if it can be.
    """

    def __init__(self, user_plan: PlanOrSchedule | None) -> None:
        self._user_plan = user_plan
        of_plan = user_plan.plan.cuts if isinstance(user_plan, UserPlan) else ()
        self._outputs = dict(of_plan)
        self._unmet = set(self._outputs)

    @property
    def outputs(self) -> Mapping[str, frozenset[int]]:
        """The outputs of each region that is cut: positions among the tensors that it returns."""
        return self._outputs

    def parts_of(self, name: str, graph: fx.GraphModule) -> GraphParts | None:
        """Give the parts of the graph of a region; `None` if it is not cut.

        Raises:
            PlanMismatch: if the user's plan cuts it where it cannot be cut.
        """
        parts = cut_at(graph, self._outputs.get(name, frozenset()))
        if name in self._unmet:
            if parts is None and isinstance(self._user_plan, UserPlan):
                raise self._user_plan.cut_mismatch(name)
            self._unmet.discard(name)
        return parts

    def add(self, name: str, graph: fx.GraphModule, outputs: frozenset[int]) -> bool:
        """Cut a region at these outputs, too, from now on; give whether it can be cut there."""
        outputs = outputs | self._outputs.get(name, frozenset())
        if cut_at(graph, outputs) is None:
            return False
        self._outputs[name] = outputs
        if self._user_plan is not None:
            logger.warning(
                "%s is for steps in which nobody asks for the gradient of an output that %s reads "
                "itself: steps are planned anew",
                self._user_plan.name,
                name,
            )
        return True
