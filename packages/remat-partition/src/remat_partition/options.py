"""Checks of the options of partitioners: bounds are whole numbers, `alpha` is a finite weight."""

from __future__ import annotations

import math
from numbers import Real
from operator import index

from remat_partition.errors import InvalidOption

__all__ = ["as_alpha", "as_bound"]


def as_bound(name: str, bound: object) -> int:
    """Read a bound on the number of members of a block.

    Raises:
        InvalidOption: if it is no int, or under 2: no cut gives every block fewer than two members.
    """
    try:
        whole = index(bound)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidOption(name, bound, "it must be an int, 2 or more") from None
    if isinstance(bound, bool):
        raise InvalidOption(name, bound, "it must be an int, 2 or more, and no bool")
    if whole < 2:
        raise InvalidOption(
            name, bound, "it must be an int, 2 or more: blocks of fewer members cut nothing"
        )
    return whole


def as_alpha(alpha: object) -> float:
    """Read the exponent of equation (1).

    Raises:
        InvalidOption: if it is no number, negative, infinite or not a number.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, Real):
        raise InvalidOption("alpha", alpha, "it must be a number, 0 or more")
    try:
        weight = float(alpha)
    except OverflowError:
        weight = math.inf
    if not (math.isfinite(weight) and weight >= 0):
        raise InvalidOption("alpha", alpha, "it must be finite and 0 or more; the paper has 0.5")
    return weight
