"""A joint graph with symbols for sizes, and the joint graphs that it is for numbers.

Each size, and each other number that is computed from symbols, has a `Slot`: its place among the
`Numbers` of a call.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._sympy.functions import Max
from torch.utils._sympy.value_ranges import bound_sympy

from remat_graph.torch.tracing.fakes import new_fake
from remat_graph.torch.tracing.joint import Joint, Layout
from remat_graph.torch.tracing.symbols import SYMBOLIC, computed, expression_of, written

__all__ = ["JointOfSizes", "Numbers", "Slot", "Traced", "filled", "layout_at", "slots_in"]

Numbers: TypeAlias = "Sequence[Any]"
_PART = 2**-12


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a number that depends on symbols, among all of a call."""

    index: int


@dataclass(frozen=True, slots=True)
class Traced:
    """What the trace says of a tensor, with slots among its sizes."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device


class JointOfSizes:
    """A joint graph that was traced with symbols of these names, which are in these ranges.

    `named` are its nodes that are no numbers, by the names that they have in the graphs that it is
    for numbers: those that they would have if those were traced. `arguments` are theirs, with slots
    for numbers; `layouts` has those of outputs that are views of inputs.
    """

    def __init__(self, joint: Joint, names: tuple[str, ...], ranges: Mapping[str, Any]) -> None:
        self.joint = joint
        self._names, self._ranges = names, ranges
        self.ties: Mapping[str, str] = {}
        self._slots: dict[Any, Slot] = {}
        self._computed: list[Node] = []  # numbers that are no sizes
        numbers = [n for n in joint.graph.nodes if isinstance(n.meta.get("val"), SYMBOLIC)]
        self.named: dict[str, Node] = {}
        self._values: dict[Node, Any] = {}
        count: Counter[str] = Counter()
        named = Graph()  # which gives no node the name of a function of Python's
        for node in joint.graph.nodes:
            self._values[node] = self._noted(node.meta.get("val"))
            if not isinstance(node.meta.get("val"), SYMBOLIC):
                name = _name(node, count)
                self.named[named.create_node(node.op, node.target, name=name).name] = node
        self.layouts = [self._noted_layout(output.layout) for output in joint.outputs]
        self._compute = computed(self._slots, names)
        for node in numbers:
            if not isinstance(node.meta["val"], torch.SymInt):
                self._values[node] = Slot(len(self._slots) + len(self._computed))
                self._computed.append(node)
        self._last: tuple[Mapping[str, Any], Numbers] | None = None
        self._numbers = set(numbers)
        self.arguments = {
            node: torch.fx.map_arg((node.args, node.kwargs), self._slot_or_node)
            for node in joint.graph.nodes
        }

        self._others: set[float] = {0, 1}
        for node in self.named.values():
            self._others.update(_constants((self._values[node], self.arguments[node])))

    def _slot_or_node(self, node: Node) -> Any:
        return self._values[node] if node in self._numbers else node

    def _noted(self, item: Any) -> Any:
        """Describe what was traced of a value, with slots for the sizes in it."""
        if isinstance(item, torch.Tensor):
            shape, stride = map(self._noted, item.shape), map(self._noted, item.stride())
            offset = self._noted(item.storage_offset())
            return Traced(tuple(shape), tuple(stride), offset, item.dtype, item.device)
        if isinstance(item, (tuple, list)):
            return type(item)([self._noted(part) for part in item])
        if isinstance(item, torch.SymInt):
            expression = expression_of(item)
            if expression.is_number:
                return int(expression)
            return self._slots.setdefault(expression, Slot(len(self._slots)))
        return item

    def _noted_layout(self, layout: Layout | None) -> Layout | None:
        if layout is None:
            return None
        shape, stride, offset = layout
        noted = self._noted
        return tuple(map(noted, shape)), tuple(map(noted, stride)), noted(offset)

    def traced(self, node: Node) -> Any:
        """Say what the trace says of a node: a `Traced` of a tensor, or several."""
        return self._values[node]

    def numbers(self, symbols: Mapping[str, Any]) -> Numbers:
        """Compute all sizes and other numbers of the graph, with these for the symbols.

        Sizes are computed from what torch says they are; other numbers, step by step, as the user's
        code does: to the last bit.
        """
        if self._last is None or self._last[0] is not symbols:
            self._last = symbols, self._all_of(symbols)
        return self._last[1]

    def numbers_apart(self, symbols: Mapping[str, Any]) -> Numbers:
        """Compute them, but each float is another one than all numbers that are computed otherwise.

        As of a counter that also multiplies a float: for no value do 5 and 5.0 differ.
        """
        return self._all_of(symbols, self._first)

    def _all_of(self, symbols: Mapping[str, Any], apart: Sequence[int] | None = None) -> Numbers:
        values = list(self._compute(*(symbols[name] for name in self._names)))
        for node in self._computed:
            if node.op == "placeholder":
                values.append(symbols[str(expression_of(node.meta["val"]))])
                continue
            function: Any = node.target
            args, kwargs = filled(self.arguments[node], values)
            value = function(*args, **kwargs)
            if apart is not None and isinstance(value, float):
                value += (1 + apart[len(values)]) * _PART
            values.append(value)
        return values

    def formulas(self, names: Mapping[int, str]) -> dict[str, str]:
        """Write what sizes are of those that are symbols, as Python, by the names of their places.

        Of those that have a name.
        """
        first = [(each, self._first[slot.index]) for each, slot in self._slots.items()]
        named = {each: names[at] for each, at in first if at in names}
        of_symbols = {
            expression: sympy.Symbol(name, integer=True, positive=expression.is_positive)
            for expression, name in named.items()
            if expression.is_Symbol
        }
        return {
            name: written(expression.xreplace(of_symbols))
            for expression, name in named.items()
            if expression.free_symbols <= of_symbols.keys()
        }

    def tied(self, ties: Mapping[str, str]) -> JointOfSizes:
        """Give the same for calls in which these symbols, by name, are equal to others."""
        other = copy.copy(self)
        other.ties = ties
        for found in ("distinct", "_first"):
            other.__dict__.pop(found, None)
        return other

    def holds_for(self, symbols: Mapping[str, Any]) -> bool:
        """Whether symbols are equal that are tied."""
        return all(symbols[name] == symbols[other] for name, other in self.ties.items())

    def is_generic(self, symbols: Mapping[str, Any]) -> bool:
        """Whether these numbers are generic for the symbols, floats kept apart from sizes.

        Not where one cannot be computed, as a root of less than zero.
        """
        try:
            return self.are_generic(self.numbers_apart(symbols))
        except (ArithmeticError, ValueError):
            return False

    def are_generic(self, numbers: Numbers) -> bool:
        """Whether two sizes, or a size and another number of the graph, are equal only if always.

        What is decided by comparing them is then the same for all numbers.
        """
        distinct = [numbers[at] for at in self.distinct]
        return len(set(distinct)) == len(distinct) and self._others.isdisjoint(distinct)

    @functools.cached_property
    def distinct(self) -> list[int]:
        """Find the numbers of tensors and their operators, each the first that is computed so.

        Numbers that are equal for many sizes may differ for others, as `max(size, 64)` and `size`.
        """
        used = {slot.index for each, slot in self._slots.items() if each.is_Symbol}
        for node in self.named.values():
            used.update(slot.index for slot in slots_in((self._values[node], self.arguments[node])))
        used.update(slot.index for slot in slots_in(self.layouts))
        return sorted({self._first[at] for at in used})

    @functools.cached_property
    def _first(self) -> list[int]:
        """Find, for each number, the first that is computed as it is."""
        own = {str(symbol): symbol for each in self._slots for symbol in each.free_symbols}
        tied = {
            own[name]: own[other]
            for name, other in self.ties.items()
            if {name, other} <= own.keys()
        }
        ways: list[Any] = [
            _simple(expression.xreplace(tied), self._ranges) for expression in self._slots
        ]
        for node in self._computed:
            of = expression_of(node.meta["val"]) if node.op == "placeholder" else node.target
            ways.append((of, str(filled(self.arguments[node], ways))))
        first: dict[Any, int] = {}
        return [first.setdefault(way, at) for at, way in enumerate(ways)]

    def at(self, numbers: Numbers) -> Joint:
        """Give the graph for numbers: a copy, in which none of its nodes is a number."""
        mode = FakeTensorMode()
        copies: dict[Node, Node] = {}
        graph, joint = Graph(), self.joint
        for name, node in self.named.items():
            args, kwargs = torch.fx.map_arg(
                filled(self.arguments[node], numbers), copies.__getitem__
            )
            copy = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
            copy.meta = dict(node.meta)
            if "val" in copy.meta:
                copy.meta["val"] = _fake(self._values[node], numbers, mode)
            copies[node] = copy
        graph.output_node().meta = dict(joint.graph.output_node().meta)
        return dataclasses.replace(
            joint,
            graph=graph,
            inputs={copies[node]: key for node, key in joint.inputs.items() if node in copies},
            tangents={copies[node]: copies[output] for node, output in joint.tangents.items()},
            outputs=tuple(
                dataclasses.replace(
                    output,
                    node=copies[output.node],
                    base=None if output.base is None else copies[output.base],
                    layout=layout_at(layout, numbers),
                )
                for output, layout in zip(joint.outputs, self.layouts, strict=True)
            ),
            mutations=tuple((copies[node], copies[new]) for node, new in joint.mutations),
            gradients={copies[node]: copies[of] for node, of in joint.gradients.items()},
        )


def filled(item: Any, numbers: Numbers) -> Any:
    """Put the numbers of a call in the place of slots."""
    kind = type(item)
    if kind is Slot:
        return numbers[item.index]
    if isinstance(item, (tuple, list)):
        return kind([filled(part, numbers) for part in item])
    if isinstance(item, dict):
        return {key: filled(part, numbers) for key, part in item.items()}
    return item


def slots_in(item: Any) -> list[Slot]:
    """List the slots in something."""
    if isinstance(item, Traced):
        item = item.shape, item.stride, item.offset
    if isinstance(item, dict):
        item = tuple(item.values())
    if isinstance(item, (tuple, list)):
        return [slot for part in item for slot in slots_in(part)]
    return [item] if isinstance(item, Slot) else []


def layout_at(layout: Layout | None, numbers: Numbers) -> Layout | None:
    """Give how a view lies in an input, with numbers for its sizes."""
    if layout is None:
        return None
    shape, stride, offset = layout
    return filled(shape, numbers), filled(stride, numbers), filled(offset, numbers)


def _simple(expression: Any, ranges: Mapping[str, Any]) -> Any:
    """Write an expression without those terms of a `Max` that never are the greatest.

    As of strides, which are no less than one.
    """
    own = {each: ranges[str(each)] for each in expression.free_symbols if str(each) in ranges}

    def greatest(*terms: Any) -> Any:
        bounds = {term: bound_sympy(term, own) for term in terms}
        for term in terms:
            upper = bounds[term].upper
            if any(other.lower >= upper for each, other in bounds.items() if each is not term):
                del bounds[term]
        return Max(*bounds)  # type: ignore[no-untyped-call]

    return sympy.expand(expression.replace(Max, greatest))


def _name(node: Node, count: Counter[str]) -> str:
    """Name a node as in a graph that was traced with numbers, where no other node is one.

    Numbers are inputs, or made by operators of Python, so that nodes of these names are counted.
    """
    base, _, number = node.name.rpartition("_")
    is_input = node.op == "placeholder"
    if not base or not number.isdigit():
        base = node.name
    if not is_input and (base == "getitem" or not hasattr(operator, base)):
        return node.name
    position = count[base] + is_input
    count[base] += 1
    return f"{base}_{position}" if position else base


def _fake(item: Any, numbers: Numbers, mode: FakeTensorMode) -> Any:
    """Make fake tensors of what was traced, with numbers for its sizes."""
    if isinstance(item, Traced):
        shape, stride = filled(item.shape, numbers), filled(item.stride, numbers)
        return new_fake(mode, shape, stride, item.dtype, item.device)
    if isinstance(item, (tuple, list)):
        return type(item)([_fake(part, numbers, mode) for part in item])
    return item


def _constants(item: Any) -> Iterator[float]:
    """Yield the numbers in something that are no slots."""
    if isinstance(item, Traced):
        yield from _constants((item.shape, item.stride, item.offset))
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from _constants(part)
    elif isinstance(item, dict):
        yield from _constants(list(item.values()))
    elif isinstance(item, (int, float)):
        yield item
