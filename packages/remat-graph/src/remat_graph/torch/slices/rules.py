"""The rule of each operator that can be run slice by slice."""

from __future__ import annotations

from typing import Any

from remat_graph.torch.slices import (
    elementwise,
    images,
    indexing,
    losses,
    norms,
    products,
    reductions,
    views,
)
from remat_graph.torch.slices.placement import Rule

__all__ = ["RULES"]

RULES: dict[Any, Rule] = {
    **elementwise.RULES,
    **images.RULES,
    **indexing.RULES,
    **losses.RULES,
    **norms.RULES,
    **products.RULES,
    **reductions.RULES,
    **views.RULES,
}
