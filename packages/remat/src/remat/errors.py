"""What the one-line API raises and warns of; errors of the layers below pass through unchanged."""

from __future__ import annotations

from remat_graph import RematError

__all__ = ["BudgetError", "BudgetWarning", "RematError"]


class BudgetError(RematError, ValueError):
    """A budget that says nothing this package understands."""


class BudgetWarning(UserWarning):
    """A step that took more memory than its budget, or runs without a plan."""
