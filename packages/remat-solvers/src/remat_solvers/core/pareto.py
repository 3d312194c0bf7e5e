"""Pareto fronts: of things with several costs, those that no other is as good as in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["pareto_front"]

_Item = TypeVar("_Item")
_Costs = tuple[float, ...]


def pareto_front(
    items: Iterable[_Item], costs: Callable[[_Item], _Costs], *, close: float = 0.0
) -> list[_Item]:
    """Leave out what another is as good as; of equal ones the first stays.

    The first costs are as good if they are within a share `close`. Quadratic.
    """
    front: list[tuple[_Item, _Costs]] = []
    for item in items:
        mine = costs(item)
        if not any(_as_good(other, mine, close) for _, other in front):
            front = [each for each in front if not _as_good(mine, each[1], close)]
            front.append((item, mine))
    return [item for item, _ in front]


def _as_good(one: _Costs, other: _Costs, close: float) -> bool:
    if one[0] > other[0] * (1 + close):
        return False
    return all(mine <= its for mine, its in zip(one[1:], other[1:], strict=True))
