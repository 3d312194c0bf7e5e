"""What the one-line API raises and warns of; errors of the layers below pass through unchanged."""

from __future__ import annotations

from remat_graph import RematError

__all__ = ["BudgetError", "BudgetWarning", "PlanMismatch", "RematError"]


class BudgetError(RematError, ValueError):
    """A budget that says nothing this package understands."""


class PlanMismatch(RematError, ValueError):
    """A plan that was made for another graph than that of the model."""


class BudgetWarning(UserWarning):
    """A step that took more memory than its budget, or runs without a plan."""
