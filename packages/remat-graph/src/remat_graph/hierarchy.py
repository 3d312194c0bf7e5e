"""A hierarchy of blocks over the forward operations of a graph.

Each backward operation sits with its twin (see `placement` for those that have none), so a
hierarchy only names forward operations. The tree is what H-Partition makes (HiRemate, section 3.1)
and what hierarchical solvers consume: `subgraph` is the problem of one block, and `unique_blocks`
are the problems that differ.

Members of a block stand in execution order: each depends on members before it alone. So the
quotient of every block by its members is acyclic, and every block is convex (a path that left one
and came back would close a cycle in the quotient of a block above it). Checked in time linear in
the dependencies times the depth of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from remat_graph.block import Block
from remat_graph.errors import InvalidGraph
from remat_graph.graph import Graph, Stage
from remat_graph.placement import backward_placement
from remat_graph.subgraph import Subgraph, cut_out
from remat_graph.unique_blocks import UniqueBlock, find_unique

__all__ = ["Hierarchy"]

_MOST_LEVELS = 100


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A tree of blocks in which every forward operation of `graph` occurs exactly once.

    Raises:
        InvalidGraph: if the graph has alternatives; naming an op that is missing, repeated,
            backward or unknown, a block name used twice, an empty block, or a dependency that runs
            against the order of the members.
    """

    graph: Graph
    root: Block

    _backward: dict[str, list[int]] = field(init=False, repr=False, compare=False)
    _block_by_name: dict[str, Block] = field(init=False, repr=False, compare=False)
    _unique: tuple[UniqueBlock, ...] | None = field(
        init=False, repr=False, compare=False, default=None
    )

    def __post_init__(self) -> None:
        if self.graph.has_alternatives:
            raise InvalidGraph(
                "a hierarchy is of ops that all run; cut graph.without_alternatives() instead"
            )
        _check_depth(self.root)
        forward = {op.name for op in self.graph.ops if op.stage is Stage.FORWARD}
        blocks: dict[str, Block] = {}
        for block in self.root.blocks():
            if block.name in blocks:
                raise InvalidGraph(f"two blocks are called {block.name!r}; names must be unique")
            blocks[block.name] = block
            if not block.members and (forward or block is not self.root):
                raise InvalidGraph(f"block {block.name!r} is empty; leave it out")
        seen: set[str] = set()
        for op in self.root.op_names():
            if op not in forward:
                raise InvalidGraph(f"a block holds {op!r}, which is no forward op of the graph")
            if op in seen:
                raise InvalidGraph(f"op {op!r} is in two blocks; each op belongs to one")
            seen.add(op)
        missing = sorted(forward - seen)
        if missing:
            raise InvalidGraph(f"op {missing[0]!r} is in no block ({len(missing)} missing in all)")
        self._check_order()
        object.__setattr__(self, "_block_by_name", blocks)
        object.__setattr__(self, "_backward", {})
        for op, place in backward_placement(self.graph, self.root.op_names()).items():
            self._backward.setdefault(place, []).append(self.graph.op_index[op])

    def __getstate__(self) -> tuple[object, ...]:
        return (self.graph, self.root)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        for name, item in zip(("graph", "root"), state, strict=True):
            object.__setattr__(self, name, item)
        object.__setattr__(self, "_unique", None)
        self.__post_init__()

    def subgraph(self, block: Block | str) -> Subgraph:
        """Cut a block, given itself or by name, out of the graph: see `Subgraph`.

        The forward ops keep the order of the whole graph, and so do the backward ops.

        Raises:
            InvalidGraph: if the hierarchy has no such block.
        """
        name = block if isinstance(block, str) else block.name
        own = self._block_by_name.get(name)
        if own is None or (isinstance(block, Block) and block != own):
            raise InvalidGraph(
                f"the hierarchy has no such block {name!r}; its blocks are hierarchy.root.blocks()"
            )
        if own is self.root:
            return cut_out(self.graph, range(len(self.graph.ops)))
        indices = []
        for op in own.op_names():
            indices.append(self.graph.op_index[op])
            indices += self._backward.get(op, ())
        return cut_out(self.graph, sorted(indices))

    @property
    def unique_blocks(self) -> tuple[UniqueBlock, ...]:
        """The classes of identical blocks, the root's included: see `UniqueBlock`.

        Classes stand in the order in which a walk leaves their first members: what is inside a
        representative belongs to its class or to earlier ones. Found at the first use, and kept.
        """
        if self._unique is None:
            blocks = _inside_first(self.root)
            classes = find_unique((block, self.subgraph(block)) for block in blocks)
            object.__setattr__(self, "_unique", classes)
            return classes
        return self._unique

    def _check_order(self) -> None:
        graph = self.graph
        ops, blocks = _spots(self.root)
        for op in graph.ops[: graph.boundary_index]:
            sources = [graph.ops[graph.producer[v]].name for v in op.inputs if v in graph.producer]
            for source in (*sources, *op.order_after):
                before, after = ops[source], ops[op.name]
                while before.block != after.block:
                    if before.depth >= after.depth:
                        before = blocks[before.block]
                    else:
                        after = blocks[after.block]
                if before.position >= after.position:
                    raise InvalidGraph(
                        f"op {op.name!r} comes after {source!r}, but in block {after.block!r} it "
                        f"is in member {after.position}, the other in member {before.position}; "
                        f"members must be in execution order, and blocks convex"
                    )


def _check_depth(root: Block) -> None:
    """Refuse what walks, copies and files, all recursive, would fail on halfway."""
    inside = [root]
    for _ in range(_MOST_LEVELS):
        inside = [m for block in inside for m in block.members if isinstance(m, Block)]
        if not inside:
            return
    raise InvalidGraph(
        f"block {inside[0].name!r} is more than {_MOST_LEVELS} blocks deep inside others; bounded "
        f"blocks need as many levels as the logarithm of their operations: nest less"
    )


def _inside_first(block: Block) -> Iterator[Block]:
    for member in block.members:
        if isinstance(member, Block):
            yield from _inside_first(member)
    yield block


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where an op or a block stands in the tree; the position is among the members of `block`."""

    block: str
    depth: int
    position: int


def _spots(root: Block) -> tuple[dict[str, _Spot], dict[str, _Spot]]:
    """Locate the ops, and the blocks other than the root, by name."""
    ops: dict[str, _Spot] = {}
    blocks: dict[str, _Spot] = {}
    for block in root.blocks():
        depth = blocks[block.name].depth + 1 if block is not root else 0
        for position, member in enumerate(block.members):
            spot = _Spot(block.name, depth, position)
            if isinstance(member, Block):
                blocks[member.name] = spot
            else:
                ops[member] = spot
    return ops, blocks
