"""Plans as files: what those of one region and of several have in common."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from remat_graph import write_atomically

__all__ = ["SavedPlan"]


class SavedPlan(ABC):
    """A plan that is written to a file and read again."""

    __slots__ = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises:
            DocumentError: if the file is damaged, or holds something else.
            OSError: if it cannot be read.
        """
        return cls.decode(Path(path).read_bytes(), source=str(path))

    @classmethod
    @abstractmethod
    def decode(cls, data: bytes, *, source: str = "document") -> Self:
        """Read the bytes of a plan file; `source` names it in errors.

        Raises:
            DocumentError: if they are damaged, or of something else.
        """

    @abstractmethod
    def encode(self) -> bytes:
        """Give the bytes of a plan file, without generated code; equal plans give equal bytes."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, atomically, for `rematerialize(model, plan=path)`.

        Raises:
            OSError: if the folder does not exist or cannot be written.
        """
        write_atomically(path, self.encode())
