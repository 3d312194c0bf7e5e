"""What the one-line API raises of its own; errors of the layers below pass through unchanged."""

from __future__ import annotations

__all__ = ["BudgetError", "RematError"]


class RematError(RuntimeError):
    """Base of the errors of this package."""


class BudgetError(RematError, ValueError):
    """A budget that says nothing this package understands."""
