"""What the one-line API raises of its own; errors of the layers below pass through unchanged."""

from __future__ import annotations

from remat_graph import RematError

__all__ = ["BudgetError", "RematError"]


class BudgetError(RematError, ValueError):
    """A budget that says nothing this package understands."""
