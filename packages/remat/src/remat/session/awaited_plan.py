"""A plan of one region that the user brought, until the graph comes that it is of."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from remat.errors import PlanMismatch
from remat.planning.task import RunnablePlan
from remat.planning.user_plan import PlanOrSchedule, UserPlan
from remat.plans.outlines import Outline
from remat_graph.torch import Capture
from remat_solvers import BudgetTooSmall

__all__ = ["MOST_EARLIER", "AwaitedPlan", "outline_of"]

logger = logging.getLogger(__name__)

MOST_EARLIER = 16  # graphs that a plan names


class AwaitedPlan:
    """The user's plan, and the graphs that were planned for before it comes.

    A model may begin with other graphs than it goes on with: a mean that is kept from the second
    step on, a number that TorchDynamo makes an input once it has changed. A plan names those that
    were planned for before its own. Of these, other plans are made meanwhile.
    """

    def __init__(self, plan: PlanOrSchedule | None) -> None:
        self._plan = plan
        self._met: dict[str, None] = {}

    def planning(
        self, make: Callable[..., RunnablePlan], *args: Any, **kwargs: Any
    ) -> Callable[..., RunnablePlan]:
        """Give a partial call that makes a plan for a graph, by the user's plan if it is of that.

        It raises `PlanMismatch` if that is of another, and this is the first, and not named in it.
        """
        make = functools.partial(make, *args, **kwargs)
        return functools.partial(self._planned, make)

    def _planned(
        self, make: Callable[..., RunnablePlan], captured: Capture, **others: Any
    ) -> RunnablePlan:
        outline, met = outline_of(captured), [*self._met]
        before = met[: met.index(outline)] if outline in self._met else met
        plan, user_plan = None, self._plan
        if user_plan is not None:
            try:
                plan = make(captured, user_plan=user_plan, **others)
                self._plan = None
            except PlanMismatch as mismatch:
                named = isinstance(user_plan, UserPlan) and outline in user_plan.plan.earlier
                if not (met or named):
                    raise
                logger.info("planned anew: %s", mismatch)
        planned = plan or self._meanwhile(make, captured, **others)
        self._met[outline] = None  # not of a capture of which no plan was made, and others are
        return replace(planned, plan=replace(planned.plan, earlier=tuple(before[-MOST_EARLIER:])))

    def _meanwhile(
        self, make: Callable[..., RunnablePlan], captured: Capture, **others: Any
    ) -> RunnablePlan:
        """Plan for a graph that the user's plan is not of, within the budget that there is."""
        try:
            return make(captured, **others)
        except BudgetTooSmall as error:
            if isinstance(self._plan, UserPlan):
                error.add_note(
                    f"This graph comes before that of {self._plan.name}, and is held to the same "
                    f"budget; budget= gives another"
                )
            raise


def outline_of(captured: Capture) -> str:
    """Give the hash of what all variants of a captured graph have in common."""
    plain = captured.without_alternatives().with_leaving_gradients(frozenset())
    return Outline.of(plain.with_deferred_outputs(frozenset()).graph).hash
