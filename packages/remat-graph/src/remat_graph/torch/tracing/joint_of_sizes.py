"""A joint graph with symbols for sizes, and the joint graphs that it is for numbers."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node

from remat_graph.torch.tracing.fakes import new_fake
from remat_graph.torch.tracing.joint import Joint, Layout
from remat_graph.torch.tracing.symbols import SYMBOLIC, computed, expression_of

__all__ = ["JointOfSizes", "Numbers"]

Numbers = Callable[[Any], Any]
"""Gives the number that a size is, or a node that computes one; what else it is given, as it is."""


class JointOfSizes:
    """A joint graph that was traced with symbols of these names.

    `named` are its nodes that are no numbers, by the names that they have in the graphs that it is
    for numbers: those that they would have if those were traced.
    """

    def __init__(self, joint: Joint, names: tuple[str, ...]) -> None:
        self.joint = joint
        self._names = names
        self._number_of: dict[Any, int] = {}
        self.named: dict[str, Node] = {}
        numbers = [n for n in joint.graph.nodes if isinstance(n.meta.get("val"), SYMBOLIC)]
        self._nodes = numbers
        count: Counter[str] = Counter()
        for node in joint.graph.nodes:
            value = node.meta.get("val")
            for number in _numbers_in(value):
                self._note(number)
            if not isinstance(value, SYMBOLIC):
                self.named[_name(node, count)] = node
        for output in joint.outputs:
            for number in _numbers_in_layout(output.layout):
                self._note(number)
        self._compute = computed(self._number_of, names)

    def _note(self, number: Any) -> None:
        if isinstance(number, torch.SymInt):
            self._number_of.setdefault(expression_of(number), len(self._number_of))

    def numbers(self, symbols: Mapping[str, Any]) -> Numbers:
        """Compute all sizes and other numbers of the graph, with these for the symbols.

        Sizes are computed from what torch says they are; other numbers, step by step, as the user's
        code does: to the last bit.
        """
        values = self._compute(*(symbols[name] for name in self._names))
        number_of = self._number_of
        at_node: dict[Node, Any] = {}

        def number(item: Any) -> Any:
            if isinstance(item, torch.SymInt):
                return values[number_of[expression_of(item)]]
            return at_node.get(item, item) if isinstance(item, Node) else item

        for node in self._nodes:
            value = node.meta["val"]
            if isinstance(value, torch.SymInt):
                at_node[node] = number(value)
            elif node.op == "placeholder":
                at_node[node] = symbols[str(expression_of(value))]
            else:
                function: Any = node.target
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), at_node.__getitem__)
                at_node[node] = function(*args, **kwargs)
        return number

    def is_generic(self, number: Numbers) -> bool:
        """Whether two sizes, or a size and another number of the graph, are equal only if always.

        What is decided by comparing them is then the same for all numbers.
        """
        sizes = [number(value) for value in self._sized()]
        constants = {0, 1}
        for node in self.named.values():
            for item in (*_numbers_in(node.meta.get("val")), *_literals((node.args, node.kwargs))):
                if not isinstance(item, SYMBOLIC):
                    constants.add(item)
        return len(set(sizes)) == len(sizes) and constants.isdisjoint(sizes)

    def _sized(self) -> Iterator[Any]:
        seen = set()
        for node in self.joint.graph.nodes:
            for item in _numbers_in(node.meta.get("val")):
                if isinstance(item, torch.SymInt) and expression_of(item) not in seen:
                    seen.add(expression_of(item))
                    if expression_of(item).free_symbols:
                        yield item

    def at(self, symbols: Mapping[str, Any]) -> Joint:
        """Give the graph for numbers: a copy, in which none of its nodes is a number."""
        number, mode = self.numbers(symbols), FakeTensorMode()
        copies: dict[Node, Any] = {}
        graph, joint = Graph(), self.joint
        for name, node in self.named.items():
            args, kwargs = torch.fx.map_arg(
                (node.args, node.kwargs), lambda n: copies[n] if n in copies else number(n)
            )
            copy = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
            copy.meta = dict(node.meta)
            if "val" in copy.meta:
                copy.meta["val"] = _at(copy.meta["val"], number, mode)
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
                    layout=layout_at(output.layout, number),
                )
                for output in joint.outputs
            ),
            mutations=tuple((copies[node], copies[new]) for node, new in joint.mutations),
            gradients={copies[node]: copies[of] for node, of in joint.gradients.items()},
        )


def layout_at(layout: Layout | None, number: Numbers) -> Layout | None:
    """Give how a view lies in an input, with numbers for its sizes."""
    if layout is None:
        return None
    shape, stride, offset = layout
    return tuple(map(number, shape)), tuple(map(number, stride)), number(offset)


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


def _at(item: Any, number: Numbers, mode: FakeTensorMode) -> Any:
    """Give what was traced of a value, with numbers for its sizes."""
    if isinstance(item, torch.Tensor):
        shape, stride = map(number, item.shape), map(number, item.stride())
        return new_fake(mode, tuple(shape), tuple(stride), item.dtype, item.device)
    if isinstance(item, (tuple, list)):
        return type(item)([_at(part, number, mode) for part in item])
    return item


def _numbers_in(item: Any) -> Iterator[Any]:
    if isinstance(item, torch.Tensor):
        yield from (*item.shape, *item.stride(), item.storage_offset())
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from _numbers_in(part)
    elif isinstance(item, SYMBOLIC):
        yield item


def _numbers_in_layout(layout: Layout | None) -> Iterator[Any]:
    if layout is not None:
        shape, stride, offset = layout
        yield from (*shape, *stride, offset)


def _literals(item: Any) -> Iterator[int]:
    if isinstance(item, (tuple, list)):
        for part in item:
            yield from _literals(part)
    elif isinstance(item, dict):
        yield from _literals(list(item.values()))
    elif isinstance(item, int):
        yield item
