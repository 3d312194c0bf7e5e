"""What the programs of all sizes of one trace have in common: one of sizes that all differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat_graph.torch.program import Program

__all__ = ["Generic"]


@dataclass(frozen=True, slots=True)
class Generic:
    """A program that stands for those of all sizes, and the sizes of one of them.

    In `program` all sizes differ from one another and from every other number, so that wherever one
    of `names` stands, that size is meant; `numbers` are what those names are in the other. `texts`
    keeps what is written for all sizes.
    """

    program: Program
    names: Mapping[float, str]
    numbers: Mapping[str, Any]
    texts: dict[Any, Any]
