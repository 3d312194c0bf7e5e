"""Arguments for each operator that has a rule of slicing, file by file as the rules are."""

from graph_cases.samples import (
    elementwise,
    images,
    indexing,
    losses,
    norms,
    products,
    reductions,
    views,
)
from graph_cases.samples.drawing import SAMPLES, Draw

__all__ = [
    "SAMPLES",
    "Draw",
    "elementwise",
    "images",
    "indexing",
    "losses",
    "norms",
    "products",
    "reductions",
    "views",
]
