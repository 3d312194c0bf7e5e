"""Which stretches of a graph that TorchDynamo made do the same, one right after another.

Such a graph has no calls of modules, so a row of blocks is found in the nodes themselves: a period
has so many nodes, each calls what the one so many nodes before it calls, with the same constants
and sizes, and reads what stands at the same place, its own inputs, or what was made before the row.
A period need not begin where a block does: the first block most often reads what the others do not.
What each period reads is put as seen from there, and must be the same for all (`_form`): nothing
that is traced says what those between would have read.
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
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from remat_graph.torch.repeats.blocks import FEWEST_PERIODS, KEPT_PERIODS, Repeat
from remat_graph.torch.tracing.inner_gradients import computes_gradients
from remat_graph.torch.tracing.joint import Key
from remat_graph.torch.tracing.provenance import noted

__all__ = ["shortened"]

_NODE = "\0"  # among the arguments of a call: no string that a graph holds
_LENGTHS = 12  # of a period that are looked at, those seen most often

_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"}
_NORMS = {torch.nn.functional.batch_norm, torch.nn.functional.instance_norm, torch.batch_norm}


def shortened(
    module: GraphModule, inputs: Mapping[Node, tuple[Key, torch.Tensor]]
) -> tuple[GraphModule, tuple[Repeat, ...]]:
    """Copy a graph with few of its periods; without a row of them it is the graph itself.

    `inputs` are the placeholders of tensors, with the inputs of the program that they are. A call
    that computes a gradient has parts of all periods in it: then all are traced.
    """
    rows = [] if computes_gradients(module) else _Nodes(module.graph, inputs).rows()
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
        """Describe what repeats."""
        return Repeat(tuple(self._blocks()), self.own, {})

    def _blocks(self) -> Iterator[tuple[str, ...]]:
        """Name the modules in which periods differ, of each period at the same positions."""
        names = [[_module_of(node) for node in period] for period in self.periods]
        distinct: dict[tuple[str, ...], None] = {}
        for across in zip(*names, strict=True):
            parts = [name.split(".") for name in across]
            depth = next(
                (at for at, level in enumerate(zip(*parts, strict=False)) if len({*level}) > 1),
                None,
            )
            if depth is not None:
                distinct[tuple(".".join(part[: depth + 1]) for part in parts)] = None
        yield from zip(*distinct, strict=True) if distinct else ((),) * len(self.periods)


class _Nodes:
    """The calls of a graph in order, and what each is where it stands."""

    def __init__(self, graph: Graph, inputs: Mapping[Node, tuple[Key, torch.Tensor]]) -> None:
        self.inputs = inputs
        self.nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        self.place = {node: at for at, node in enumerate(self.nodes)}
        self.reads = [_read_by(node) for node in self.nodes]
        self.returned = _read_by(graph.output_node())
        numbers: dict[Hashable, int] = {}
        self.kinds = [numbers.setdefault(_kind_of(node), len(numbers)) for node in self.nodes]

    def rows(self) -> list[_Row]:
        """Find the rows of periods that leave out most."""
        rows: list[_Row] = []
        taken: set[Node] = set()
        for start, length, count in self._candidates():
            nodes = self.nodes[start : start + length * count]
            if taken.isdisjoint(nodes):
                row = self._row(start, length, count)
                if row is not None:
                    rows.append(row)
                    taken.update(nodes)
        return sorted(rows, key=lambda row: self.place[row.periods[0][0]])

    def _candidates(self) -> list[tuple[int, int, int]]:
        """List where rows may be: start, length of a period, how many; the longest first."""
        candidates, returned = [], set(self.returned)
        for length in self._lengths():
            pairs = zip(self.nodes, self.nodes[length:], strict=False)
            same = [returned.isdisjoint(pair) and self._are_same(*pair) for pair in pairs]
            at = 0
            for value, group in itertools.groupby(same):
                size = len(list(group))
                for skipped in self._beginnings(at, length) if value else ():
                    count = (size - skipped) // length  # the backward of the last begins otherwise
                    if count >= FEWEST_PERIODS:
                        candidates.append((at + skipped, length, count))
                at += size
        left_out = 2 * KEPT_PERIODS
        candidates.sort(key=lambda row: (-row[1] * (row[2] - left_out), row[1]))
        return candidates

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
        if read in self.inputs and counterpart in self.inputs:
            return _looks_of_input(self.inputs[read][1]) == _looks_of_input(
                self.inputs[counterpart][1]
            )
        return (
            read in self.place
            and counterpart in self.place
            and self.place[counterpart] - self.place[read] == by
        )

    def _row(self, start: int, length: int, count: int) -> _Row | None:
        """Make a row of periods; `None` if they do not all read the same, each where it stands."""
        end = start + length * count
        firsts = range(start, end, length)
        if not all(self._may_repeat(at, first) for first in firsts
                   for at in range(first, first + length)):  # fmt: skip
            return None
        inputs = [self._inputs_of(range(first, first + length)) for first in firsts]
        times = Counter(itertools.chain(*inputs))
        own = [{key: looks for key, looks in keys.items() if times[key] == 1} for keys in inputs]
        if not own[0] or any(1 < n < count for n in times.values()):
            return None
        if any([*keys.values()] != [*own[0].values()] for keys in own):
            return None
        forms = [
            self._form(first, length, start, list(keys))
            for first, keys in zip(firsts, own, strict=True)
        ]
        if any(form != forms[1] for form in forms[2:]) or not all(
            mine == its or (mine[0] == "same" and its[0] == "before")
            for mine, its in zip(forms[0], forms[1], strict=True)
        ):
            return None
        if any(kind == "far" or (kind == "same" and self._is_differentiated(read))
               for kind, read in forms[1]):  # fmt: skip
            return None
        outside = self._inputs_of([*range(start), *range(end, len(self.nodes))], self.returned)
        hidden = range(start + KEPT_PERIODS * length, end - KEPT_PERIODS * length)
        later = itertools.chain(self.returned, *self.reads[end - (KEPT_PERIODS - 1) * length :])
        if any(key in outside for keys in own for key in keys) or any(
            self.place.get(read, -1) in hidden for read in later
        ):
            return None
        periods = [tuple(self.nodes[at : at + length]) for at in firsts]
        return _Row(tuple(periods), tuple(map(tuple, own)))

    def _inputs_of(self, places: Iterable[int], more: Iterable[Node] = ()) -> dict[Key, Hashable]:
        """List the inputs of the program that nodes read, in order, and how they look."""
        reads = itertools.chain(*(self.reads[at] for at in places), more)
        items = [self.inputs[read] for read in reads if read in self.inputs]
        return {key: _looks_of_input(tensor) for key, tensor in items}

    def _form(self, first: int, length: int, start: int, own: list[Key]) -> list[tuple[str, Any]]:
        """Describe what the nodes of a period read, each read as seen from there.

        That is an input of its own, what it `made` or the one `before` it in the row; or the
        `same` node, from before the row. What stands further back is `far`: it has no such name.
        """
        form: list[tuple[str, Any]] = []
        for read in itertools.chain(*self.reads[first : first + length]):
            place = self.place.get(read, -1)
            if read in self.inputs and self.inputs[read][0] in own:
                form.append(("own", own.index(self.inputs[read][0])))
            elif place >= first:
                form.append(("made", place - first))
            elif place >= max(start, first - length):
                form.append(("before", place - first))
            else:
                form.append(("same", read) if place < start else ("far", None))
        return form

    def _is_differentiated(self, node: Node) -> bool:
        """Whether a gradient of what a node gives is computed."""
        value = self.inputs[node][1] if node in self.inputs else node.meta.get("example_value")
        tensors = pytree.tree_leaves(value)
        return any(isinstance(item, torch.Tensor) and item.requires_grad for item in tensors)

    def _may_repeat(self, at: int, first: int) -> bool:
        """Whether a node may be of a period, which begins at `first`, as far as its call tells.

        What it changes beside what the period made shows in the traced program, at the latest.
        """
        node, reads = self.nodes[at], self.reads[at]
        if node.op not in ("call_function", "call_method") or node.target is operator.setitem:
            return False  # which makes constants
        if node.target in _NORMS and _has_statistics(node):
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
        or name in _IN_PLACE
        or bool(node.kwargs.get("inplace"))
        or "out" in node.kwargs
    )


def _read_by(node: Node) -> tuple[Node, ...]:
    """List the nodes among the arguments of a node, each as often as it is there."""
    sources: list[Node] = []
    map_arg((node.args, node.kwargs), sources.append)
    return tuple(sources)


def _kind_of(node: Node) -> Hashable:
    """Describe what a node calls, but for which nodes it reads."""
    constants = repr(map_arg((node.args, node.kwargs), lambda _: _NODE))
    looks = [_looks(item) for item in pytree.tree_leaves(node.meta.get("example_value"))]
    alone = node if "nan" in constants else None  # whose sign is not shown
    return node.op, node.target, constants, repr(looks), alone


def _looks(item: Any) -> tuple[Any, ...]:
    """Describe what tracing can see of a tensor."""
    if not isinstance(item, torch.Tensor):
        return (type(item),)
    shown = type(item), tuple(item.shape), item.dtype, item.device, item.layout
    where = None
    if item.layout is torch.strided:
        where = item.stride(), item.storage_offset(), item.is_conj(), item.is_neg()
    return *shown, where, item.requires_grad


def _looks_of_input(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Describe what tracing can see of an input; of other tensors torch may refuse the last."""
    return *_looks(tensor), tensor.is_leaf


def _module_of(node: Node) -> str:
    provenance = noted(node)
    return "" if provenance is None else provenance.module
