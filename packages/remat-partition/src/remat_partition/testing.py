"""For those who write a partitioner: whether it cuts what it is given, and always the same way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from remat_graph import Block, Graph, Hierarchy, RematError
from remat_graph.testing import random_dag, random_training, unit_chain
from remat_partition.errors import BrokenPartitioner, PartitionError
from remat_partition.interface import Partitioner
from remat_partition.partitioning import partition
from remat_partition.registry import resolve_partitioner

__all__ = ["PartitionerCheck", "PartitionerCheckFailed", "check_partitioner"]

_LARGE_STEPS = 1_000


class PartitionerCheckFailed(RematError, AssertionError):
    """A partitioner that does not do what it should; `check` has all that was found."""

    def __init__(self, check: PartitionerCheck) -> None:
        super().__init__(str(check))
        self.check = check


@dataclass(slots=True)
class PartitionerCheck:
    """What came of a check; print it.

    `largest_block` is the most members that a block of the cut chain has, the root included.
    """

    partitioner: str
    graphs: int = 0
    refused: int = 0
    largest_block: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Write all, the faults first."""
        return "\n".join(
            [
                f"partitioner {self.partitioner!r}: {len(self.faults)} faults; of {self.graphs} "
                f"graphs {self.refused} refused; of a chain of {_LARGE_STEPS:,} steps no block has "
                f"more than {self.largest_block} members",
                *(f"- {fault}" for fault in self.faults),
            ]
        )


def check_partitioner(
    partitioner: str | Partitioner | type[Partitioner], *, graphs: int = 60, seed: int = 0
) -> PartitionerCheck:
    """Check that a partitioner makes hierarchies, equal ones of equal graphs; return what came.

    `partitioner` is one, its class, or a name from `list_partitioners()`. `graphs` random ones,
    drawn from `seed`, are cut, and a long chain.

    Raises:
        PartitionerCheckFailed: with every fault: an exception that is no `PartitionError`, a result
            that is no hierarchy of the graph, another one the second time, or nothing cut at all.
        PartitionError: if there is no such partitioner.
    """
    checked = resolve_partitioner(
        partitioner() if isinstance(partitioner, type) else partitioner
    ).partitioner
    check = PartitionerCheck(checked.name)
    chain = unit_chain(_LARGE_STEPS)
    for label, graph in (("a long chain", chain), *_drawn(graphs, seed)):
        check.graphs += 1
        first = _cut(checked, graph, label, check)
        if first is None:
            continue
        if graph is chain:
            check.largest_block = max(map(len, _members(first.root)))
        again = _cut(checked, copy.deepcopy(graph), label, check)
        if again is not None and again.root != first.root:
            check.faults.append(f"{label}: it is cut in another way the second time")
    if check.refused == check.graphs:
        check.faults.append("it refused every graph, even a chain")
    if check.faults:
        raise PartitionerCheckFailed(check)
    return check


def _drawn(count: int, seed: int) -> Iterator[tuple[str, Graph]]:
    random = Random(seed)
    for number in range(count):
        graph = (random_training if number % 2 else random_dag)(random)
        yield f"random graph {number} of seed {seed} ({len(graph.ops)} ops)", graph


def _cut(
    partitioner: Partitioner, graph: Graph, label: str, check: PartitionerCheck
) -> Hierarchy | None:
    try:
        return partition(graph, partitioner=partitioner)
    except BrokenPartitioner as error:
        check.faults.append(f"{label}: {error}")
    except PartitionError as error:
        check.refused += 1
        if not str(error).strip():
            check.faults.append(f"{label}: it refused without a reason")
    return None


def _members(block: Block) -> Iterator[tuple[str | Block, ...]]:
    yield block.members
    for member in block.members:
        if isinstance(member, Block):
            yield from _members(member)
