"""Items by name that are made when they are first read."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import TypeVar

__all__ = ["Later"]

T = TypeVar("T")


class Later(Mapping[str, T]):
    """The items of another mapping, of which those `changed` are made anew, one by one."""

    def __init__(
        self, of: Mapping[str, T], changed: Container[str], make: Callable[[str], T]
    ) -> None:
        self._of, self._changed, self._make = of, changed, make
        self._made: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._changed:
            return self._of[name]
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)
