"""What a user may write as a budget, and how many bytes it is.

A budget bounds what one forward plus backward allocates on the device beyond what was resident
before the call.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import SupportsIndex

from remat.errors import BudgetError

__all__ = ["Budget", "parse_budget"]

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_EXAMPLES = "8 * 2**30, '8GiB', '500 MB', 0.5, '50%' or 'auto'"
_WRITTEN = "8GiB, 500 MB, 4000000 B, 0.5, 50% or auto"  # as text, on a command line too
_WITH_UNIT = "a number with a unit, such as 8GiB or 4000000 B"


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget as it was meant: one of `size_bytes`, a `fraction` of plain's peak, or neither.

    Neither is `"auto"`, which is fixed at the first step: see `remat.budgets.auto`.
    """

    size_bytes: int | None = None
    fraction: float | None = None

    @property
    def is_auto(self) -> bool:
        """Whether it is what is free."""
        return self.size_bytes is None and self.fraction is None

    def resolve(self, plain_peak_bytes: Callable[[], int]) -> int:
        """Turn it into bytes; `plain_peak_bytes` is asked only if it is a fraction.

        Raises:
            BudgetError: if it is `"auto"`, and was not fixed.
        """
        if self.size_bytes is not None:
            return self.size_bytes
        if self.fraction is None:
            raise BudgetError("budget='auto' is not known before the first step")
        return max(1, int(self.fraction * plain_peak_bytes()))


def parse_budget(budget: object) -> Budget:
    """Read a budget: an int is bytes, a float in (0, 1] a fraction, a string has a unit.

    Raises:
        BudgetError: if it is none of these, or not above zero.
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, str):
        return _parse_text(budget)
    if isinstance(budget, bool):
        raise BudgetError(f"budget={budget!r}; give {_EXAMPLES}")
    if isinstance(budget, float):
        return _fraction(budget, repr(budget), "a whole number or a string with a unit")
    if isinstance(budget, SupportsIndex):
        with contextlib.suppress(TypeError):  # a tensor has the method, and may be no whole number
            return _size(operator.index(budget), repr(budget))
    raise BudgetError(f"budget={budget!r}; give {_EXAMPLES}")


def _parse_text(text: str) -> Budget:
    stripped = text.strip().lower()
    if stripped == "auto":
        return Budget()
    match = re.fullmatch(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([a-z]+|%|)", stripped)
    if match is None:
        raise BudgetError(f"budget={text!r} has no unit or is no number; give {_WRITTEN}")
    number, unit = float(match[1]), match[2]
    if not unit:
        if "." not in match[1]:
            raise BudgetError(f"budget={text!r} has no unit; give {_WRITTEN}")
        return _fraction(number, repr(text), _WITH_UNIT)
    if unit == "%":
        return _fraction(number / 100, repr(text), _WITH_UNIT)
    if unit not in _UNITS:
        raise BudgetError(f"budget={text!r} has the unknown unit {match[2]!r}; give {_WRITTEN}")
    return _size(int(number * _UNITS[unit]), repr(text))


def _fraction(value: float, shown: str, bytes_: str) -> Budget:
    if not 0 < value <= 1:
        raise BudgetError(
            f"budget={shown} is a fraction of the peak without recomputation and must be above 0 "
            f"and at most 1; for bytes give {bytes_}"
        )
    return Budget(fraction=value)


def _size(value: int, shown: str) -> Budget:
    if value <= 0:
        raise BudgetError(f"budget={shown}; it must be above zero: {_EXAMPLES}")
    return Budget(size_bytes=value)
