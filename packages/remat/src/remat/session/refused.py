"""What cannot be captured of a region: a reason that holds for two sizes is taken to for all."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from remat_graph.torch import CaptureError

__all__ = ["RefusedCaptures"]


class RefusedCaptures:
    """The last refusal of a region, and whether another size was refused for the same before."""

    def __init__(self) -> None:
        self._last: tuple[type[CaptureError], str] | None = None
        self._sizes: Hashable = None
        self._is_for_all = False

    @contextmanager
    def seen(self, sizes: Hashable) -> Iterator[None]:
        """See whether a call of these sizes is refused within; refuse it at once if all are.

        Raises:
            CaptureError: if all are.
        """
        if self._last is not None and self._is_for_all:
            error, reason = self._last
            raise error(reason)
        try:
            yield
        except CaptureError as error:
            refused = type(error), str(error)
            self._is_for_all = refused == self._last and sizes != self._sizes
            self._last, self._sizes = refused, sizes
            raise
