"""Which stretches of a graph that TorchDynamo made do the same, one right after another.

Such a graph has no calls of modules, so a row of blocks is found in the nodes themselves: a period
has so many nodes, each calls what the one so many nodes before it calls, with the same constants
and sizes, and reads what stands at the same place, its own inputs, or what was made before the row.
A period need not begin where a block does: the first block most often reads what the others do not.
As in `repeats`, two periods at each end are traced, and what those between do is put into the
program (`unrolling`): here their nodes are left out, and the period after them reads what it would
read if the second one were before it.

Nothing repeats where periods hold graphs of their own (checkpoints, custom functions), update
running statistics or write to what they did not make, where all read one tensor that gets a
gradient (as the decoder blocks of T5), or where later code reads what those between made. Time:
linear in the nodes, for each of a few lengths of a period.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from remat_graph.torch.noting import Key
from remat_graph.torch.provenance import noted
from remat_graph.torch.repeats import FEWEST_PERIODS, KEPT_PERIODS, Repeat

__all__ = ["shortened"]

_NODE = "\0"  # among the arguments of a call: no string that a graph holds
_LENGTHS = 12  # of a period that are looked at, those seen most often

_NORMS = {torch.nn.functional.batch_norm, torch.nn.functional.instance_norm, torch.batch_norm}


def shortened(
    module: GraphModule, given: Mapping[Node, tuple[Key, torch.Tensor]]
) -> tuple[GraphModule, tuple[Repeat, ...]]:
    """Copy a graph with few of its periods; without a row of them it is the graph itself.

    `given` are the placeholders of tensors, with the inputs of the program that they are.
    """
    rows = _Nodes(module.graph, given).rows()
    if not rows:
        return module, ()
    graph = Graph()
    left_out = {node for row in rows for node in row.between}
    read_as = {node: twin for row in rows for node, twin in row.stand_ins()}
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node not in left_out:
            copies[node] = graph.node_copy(node, lambda n: copies[read_as.get(n, n)])
    short = GraphModule(module, graph)
    short.meta.update(module.meta)
    return short, tuple(row.repeat for row in rows)


@dataclass(frozen=True, slots=True)
class _Row:
    """Periods of nodes that do the same, and the inputs that each of them alone reads."""

    periods: tuple[tuple[Node, ...], ...]
    own: tuple[tuple[Key, ...], ...]

    @property
    def between(self) -> Iterator[Node]:
        """The nodes that are not traced."""
        yield from itertools.chain(*self.periods[KEPT_PERIODS:-KEPT_PERIODS])

    def stand_ins(self) -> Iterator[tuple[Node, Node]]:
        """Pair what the period after those left out reads of the last of them with what it is."""
        yield from zip(self.periods[-KEPT_PERIODS - 1], self.periods[KEPT_PERIODS - 1], strict=True)

    @property
    def repeat(self) -> Repeat:
        """Say what repeats."""
        return Repeat(tuple(self._blocks()), self.own, {})

    def _blocks(self) -> Iterator[tuple[str, ...]]:
        """Name the modules in which periods differ, of each period at the same positions."""
        names = [[_module_of(node) for node in period] for period in self.periods]
        found: dict[tuple[str, ...], None] = {}
        for across in zip(*names, strict=True):
            parts = [name.split(".") for name in across]
            depth = next(
                (at for at, level in enumerate(zip(*parts, strict=False)) if len({*level}) > 1),
                None,
            )
            if depth is not None:
                found[tuple(".".join(part[: depth + 1]) for part in parts)] = None
        yield from zip(*found, strict=True) if found else ((),) * len(self.periods)


class _Nodes:
    """The calls of a graph in order, and what each is where it stands."""

    def __init__(self, graph: Graph, given: Mapping[Node, tuple[Key, torch.Tensor]]) -> None:
        self.given = given
        self.nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        self.place = {node: at for at, node in enumerate(self.nodes)}
        self.reads = [_read_by(node) for node in self.nodes]
        self.returned = _read_by(graph.output_node())
        numbers: dict[Hashable, int] = {}
        self.kinds = [numbers.setdefault(_kind_of(node), len(numbers)) for node in self.nodes]

    def rows(self) -> list[_Row]:
        """Find the rows of periods that leave out most."""
        found: list[_Row] = []
        taken: set[Node] = set()
        for start, length, count in self._candidates():
            nodes = self.nodes[start : start + length * count]
            if taken.isdisjoint(nodes):
                row = self._row(start, length, count)
                if row is not None:
                    found.append(row)
                    taken.update(nodes)
        return sorted(found, key=lambda row: self.place[row.periods[0][0]])

    def _candidates(self) -> list[tuple[int, int, int]]:
        """List where rows may be: start, length of a period, how many; the longest first."""
        found, returned = [], set(self.returned)
        for length in self._lengths():
            pairs = zip(self.nodes, self.nodes[length:], strict=False)
            same = [returned.isdisjoint(pair) and self._are_same(*pair) for pair in pairs]
            at = 0
            for value, group in itertools.groupby(same):
                size = len(list(group))
                for skipped in self._beginnings(at, length) if value else ():
                    count = (size - skipped) // length  # the backward of the last begins otherwise
                    if count >= FEWEST_PERIODS:
                        found.append((at + skipped, length, count))
                at += size
        left_out = 2 * KEPT_PERIODS
        found.sort(key=lambda row: (-row[1] * (row[2] - left_out), row[1]))
        return found

    def _beginnings(self, start: int, length: int) -> Iterator[int]:
        """Say how many nodes to skip so that periods begin with a block; or to skip none."""
        before = self._block(start, length)
        for skipped in range(1, length):
            block = self._block(start + skipped, length)
            if block != before:
                yield skipped
                break
        yield 0

    def _block(self, at: int, length: int) -> str:
        """Name the module of a node as far as that a period later has another name."""
        if at + length >= len(self.nodes):
            return ""
        name, later = _module_of(self.nodes[at]), _module_of(self.nodes[at + length])
        parts = name.split(".")
        differs = [a != b for a, b in zip(parts, later.split("."), strict=False)]
        return ".".join(parts[: 1 + differs.index(True)]) if True in differs else name

    def _lengths(self) -> list[int]:
        """List how far nodes are apart that call the same, the most frequent first."""
        last: dict[int, int] = {}
        counts: Counter[int] = Counter()
        for at, kind in enumerate(self.kinds):
            if kind in last:
                counts[at - last[kind]] += 1
            last[kind] = at
        return [length for length, _ in counts.most_common(_LENGTHS)]

    def _are_same(self, node: Node, twin: Node) -> bool:
        """Whether two nodes do the same, each where it stands."""
        at, other = self.place[node], self.place[twin]
        if self.kinds[at] != self.kinds[other]:
            return False
        pairs = zip(self.reads[at], self.reads[other], strict=True)
        return all(a is b or self._stands_for(a, b, other - at) for a, b in pairs)

    def _stands_for(self, read: Node, counterpart: Node, by: int) -> bool:
        if read in self.given and counterpart in self.given:
            return bool(_looks(self.given[read][1]) == _looks(self.given[counterpart][1]))
        return (
            read in self.place
            and counterpart in self.place
            and self.place[counterpart] - self.place[read] == by
        )

    def _row(self, start: int, length: int, count: int) -> _Row | None:
        """Make a row of periods; `None` if they are not alone with what is theirs."""
        end = start + length * count
        own: list[tuple[Key, ...]] = []
        shared: set[Key] = set()
        for first in range(start, end, length):
            keys: dict[Key, None] = {}
            for at in range(first, first + length):
                if not self._may_repeat(at, first):
                    return None
                like = at + length if at + length < end else at - length
                for read, other in zip(self.reads[at], self.reads[like], strict=True):
                    if read is other and self._is_differentiated(read):
                        return None  # the last to add to its gradient does what no other does
                    if read in self.given:
                        key = self.given[read][0]
                        if read is other:
                            shared.add(key)
                        else:
                            keys[key] = None
                    elif self.place.get(read, -1) >= start and (
                        read is other or self.place[read] < first - length
                    ):
                        return None  # what one period made for all, or more than one before
            own.append(tuple(keys))
        if not own[0] or len({len(keys) for keys in own}) > 1:
            return None
        taken = Counter(itertools.chain(*own))
        outside = itertools.chain(self.returned, *self.reads[:start], *self.reads[end:])
        hidden = range(start + KEPT_PERIODS * length, end - KEPT_PERIODS * length)
        later = itertools.chain(self.returned, *self.reads[end - (KEPT_PERIODS - 1) * length :])
        if (
            max(taken.values()) > 1
            or not shared.isdisjoint(taken)
            or any(read in self.given and self.given[read][0] in taken for read in outside)
            or any(self.place.get(read, -1) in hidden for read in later)
        ):
            return None
        periods = [tuple(self.nodes[at : at + length]) for at in range(start, end, length)]
        return _Row(tuple(periods), tuple(own))

    def _is_differentiated(self, node: Node) -> bool:
        """Whether a gradient of what a node gives is computed."""
        known = self.given[node][1] if node in self.given else node.meta.get("example_value")
        tensors = pytree.tree_leaves(known)
        return any(isinstance(item, torch.Tensor) and item.requires_grad for item in tensors)

    def _may_repeat(self, at: int, first: int) -> bool:
        """Whether a node changes nothing but what its period, which begins at `first`, made."""
        node, reads = self.nodes[at], self.reads[at]
        if node.op not in ("call_function", "call_method") or node.target is operator.setitem:
            return False  # which makes constants
        if node.target in _NORMS and len(node.all_input_nodes) > 1 and _has_statistics(node):
            return False
        return not _writes(node) or (bool(reads) and self.place.get(reads[0], -1) >= first)


def _has_statistics(node: Node) -> bool:
    statistics = node.args[1] if len(node.args) > 1 else node.kwargs.get("running_mean")
    return isinstance(statistics, Node)


def _writes(node: Node) -> bool:
    """Whether a node may change what it reads first."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (
        (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("i") and name[1:] in _OPERATORS)
        or bool(node.kwargs.get("inplace"))
        or "out" in node.kwargs
    )


_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "matmul",
)


def _read_by(node: Node) -> tuple[Node, ...]:
    """List the nodes among the arguments of a node, each as often as it is there."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return tuple(found)


def _kind_of(node: Node) -> Hashable:
    """Say what a node calls, but for which nodes it reads."""
    constants = map_arg((node.args, node.kwargs), lambda _: _NODE)
    made = [_looks(item) for item in pytree.tree_leaves(node.meta.get("example_value"))]
    return node.op, node.target, repr(constants), repr(made)


def _looks(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return type(item)
    shown = (
        tuple(item.shape),
        item.dtype,
        item.device,
        item.layout,
        item.requires_grad,
        item.is_leaf,
    )
    return type(item), *shown, item.stride() if item.layout is torch.strided else None


def _module_of(node: Node) -> str:
    known = noted(node)
    return "" if known is None else known.module
