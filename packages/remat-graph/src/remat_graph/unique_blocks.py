"""Blocks that are the same work on the same bytes, found once: solve one, translate to the others.

HiRemate, C.1.1: each op as its equivalence class and the positions of what it reads, in the order
of the code, into a hash table. Here the canonical form of a block is that of its `Subgraph`: the
`canonical_hash` of its graph, forward and backward half, and the role of every value at its border.
It has what the simulator looks at (sizes, times, workspaces, order, which ops run once), so ops
that are declared equivalent and yet differ in cost are told apart.

Guarantee: two blocks are in one class exactly when renaming ops and values turns the subgraph of
one into that of the other, in their order (SHA-256 collisions aside). A schedule for one,
translated, has the same timeline for the other, step by step. What is inside a block counts, not
how it is cut further: blocks of different levels may be in one class. Time linear in the ops of the
graph for each level of the hierarchy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from remat_graph.block import Block
from remat_graph.errors import InvalidGraph, InvalidSchedule
from remat_graph.hashing import canonical_hash
from remat_graph.schedule import Compute, Free, Schedule, Step
from remat_graph.subgraph import Subgraph

__all__ = ["Translation", "UniqueBlock", "block_hash", "find_unique"]

# The names of the ops and of the values of a block, in canonical order.
Names = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Translation:
    """What the ops and values of a representative are called in one member of its class."""

    ops: Mapping[str, str]
    values: Mapping[str, str]

    def schedule(self, schedule: Schedule) -> Schedule:
        """Rename the steps of a schedule for the representative.

        Raises:
            InvalidSchedule: if a step names what the representative does not have.
        """
        return Schedule(tuple(self._step(step, i) for i, step in enumerate(schedule)))

    def _step(self, step: Step, position: int) -> Step:
        if isinstance(step, Compute) and step.op in self.ops:
            return Compute(self.ops[step.op])
        if isinstance(step, Free) and step.value in self.values:
            return Free(self.values[step.value])
        name = step.op if isinstance(step, Compute) else step.value
        raise InvalidSchedule(f"names {name!r}, which the representative does not have", position)


@dataclass(frozen=True, slots=True)
class UniqueBlock:
    """A class of identical blocks: its first member represents it.

    `members` are in the order in which a walk leaves the blocks, so those inside come before those
    around them. `hash` is the same in every hierarchy, and for every graph.
    """

    hash: str
    members: tuple[Block, ...]
    _names: Mapping[str, Names] = field(repr=False, compare=False)

    @property
    def representative(self) -> Block:
        """The member to solve."""
        return self.members[0]

    def translation(self, member: Block | str) -> Translation:
        """Say what the representative's ops and values are called in a member.

        Raises:
            InvalidGraph: if there is no such block in the class.
        """
        name = member if isinstance(member, str) else member.name
        if name not in self._names:
            raise InvalidGraph(
                f"block {name!r} is not identical to {self.representative.name!r}; those that "
                f"are: {', '.join(map(repr, self._names))}"
            )
        ops, values = self._names[self.representative.name]
        other_ops, other_values = self._names[name]
        return Translation(
            dict(zip(ops, other_ops, strict=True)), dict(zip(values, other_values, strict=True))
        )


def block_hash(subgraph: Subgraph) -> str:
    """Hash a subgraph up to names, with the roles of its values: 64 hexadecimal digits."""
    number = {value.name: i for i, value in enumerate(subgraph.graph.values)}
    roles = [
        [number[v] for v in values]
        for values in (
            subgraph.parameters,
            subgraph.inputs,
            subgraph.gradients_in,
            subgraph.outputs,
            subgraph.gradients_out,
        )
    ]
    content = repr((canonical_hash(subgraph.graph), roles, subgraph.readers))
    return hashlib.sha256(b"remat-graph block 1" + content.encode()).hexdigest()


def find_unique(blocks: Iterable[tuple[Block, Subgraph]]) -> tuple[UniqueBlock, ...]:
    """Group blocks by what they stand for; classes by their first member."""
    groups: dict[str, list[Block]] = {}
    names: dict[str, dict[str, Names]] = {}
    for block, subgraph in blocks:
        key = block_hash(subgraph)
        groups.setdefault(key, []).append(block)
        names.setdefault(key, {})[block.name] = (
            tuple(op.name for op in subgraph.graph.ops),
            tuple(value.name for value in subgraph.graph.values),
        )
    return tuple(UniqueBlock(key, tuple(members), names[key]) for key, members in groups.items())
