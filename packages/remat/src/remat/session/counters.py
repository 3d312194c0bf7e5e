"""Numbers that a graph only counts with, such as a step counter on the module: computed apart.

TorchDynamo makes a number that changes an input of the graph, and what is computed of it an output.
Where no tensor depends on it, one capture and one plan serve for all numbers. A float is handed
over as a tensor, of which the graph takes the item: it is made a number again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from remat.dynamo.checkpoints import CHECKPOINT

__all__ = ["Counters"]

# Operators that run a graph, their first argument; from this one on they are what that is given.
_BODIES: dict[Any, int] = {CHECKPOINT: 1, torch.ops.higher_order.autograd_function_apply: 2}
_OF_NUMBERS = frozenset(
    {max, min, abs, round, int, float, bool}
    | {getattr(torch, name) for name in dir(torch) if name.startswith("sym_")}
)


class Counters:
    """The outputs of a graph that are numbers made of numbers; taken out of the graph.

    `matter` are the positions of the inputs that are no tensors and that the rest of it reads,
    `sized` those of tensors of which the graph leaves some size open, `items` those of tensors of
    which it took no more than the item: it gets the item in place of the tensor.
    """

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        items = {at: _items_of(graph, node) for at, node in enumerate(placeholders)}
        self.items = tuple(at for at, nodes in items.items() if nodes)
        for at in self.items:
            example = items[at][0][1].meta.get("example_value")
            placeholders[at].meta["example_value"] = example
            for module, item in items[at]:
                item.replace_all_uses_with(cast("fx.Node", item.args[0]))
                module.graph.erase_node(item)
                module.recompile()
        numbers = {node: None for node in placeholders if _is_number(node)}
        for node in graph.graph.nodes:
            if _computes_a_number(node) and all(of in numbers for of in node.all_input_nodes):
                numbers[node] = None
        output = graph.graph.output_node()
        returned = list(output.args[0]) if isinstance(output.args[0], (list, tuple)) else []
        self._outputs = {at: node for at, node in enumerate(returned) if node in numbers}
        self._inputs = {node: at for at, node in enumerate(placeholders) if node in numbers}
        self._steps: list[tuple[fx.Node, Callable[..., Any], Any, Any]] = [
            (node, node.target, node.args, node.kwargs)
            for node in numbers
            if node.op == "call_function" and callable(node.target)
        ]
        if self._outputs:
            output.args = (tuple(None if node in numbers else node for node in returned),)
            for node in reversed(numbers):
                if node.op == "call_function" and not node.users:
                    graph.graph.erase_node(node)
            graph.recompile()
        self.matter = tuple(
            at for at, node in enumerate(placeholders) if node.users and _may_be_number(node)
        )
        self.sized = tuple(at for at, node in enumerate(placeholders) if _is_sized(node))

    def with_numbers(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Give the inputs of the graph, with numbers in place of the tensors that held them."""
        if not self.items:
            return inputs
        values = list(inputs)
        for at in self.items:
            if isinstance(values[at], torch.Tensor):
                values[at] = values[at].item()
        return values

    def put_back(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        """Give the outputs of the graph with the numbers among them."""
        if not self._outputs:
            return outputs
        values: dict[fx.Node, Any] = {node: inputs[at] for node, at in self._inputs.items()}
        for node, function, args, kwargs in self._steps:
            values[node] = function(
                *fx.map_arg(args, values.__getitem__), **fx.map_arg(kwargs, values.__getitem__)
            )
        replaced = list(outputs)
        for at, node in self._outputs.items():
            replaced[at] = values[node]
        return type(outputs)(replaced) if isinstance(outputs, tuple) else replaced


def _computes_a_number(node: fx.Node) -> bool:
    target: Any = node.target
    return node.op == "call_function" and (
        target in _OF_NUMBERS or getattr(operator, getattr(target, "__name__", ""), None) is target
    )


def _is_number(node: fx.Node) -> bool:
    return isinstance(_example(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _may_be_number(node: fx.Node) -> bool:
    return not isinstance(_example(node), torch.Tensor)


def _behind(
    module: fx.GraphModule, call: fx.Node, forward: fx.GraphModule
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]] | None:
    """Give the backward of an `autograd.Function`, and which of its inputs the forward hands on."""
    if len(call.args) < 2 or _BODIES[call.target] < 2:
        return None
    backward = cast("fx.GraphModule", getattr(module, str(cast("fx.Node", call.args[1]).target)))
    returned = forward.graph.output_node().args[0]
    handed = returned[1] if isinstance(returned, tuple) and len(returned) == 2 else ()
    if not isinstance(handed, tuple):
        return None
    inputs = list(backward.graph.find_nodes(op="placeholder"))
    return backward, dict(zip(handed, inputs[len(inputs) - len(handed) :], strict=True))


def _items_of(
    module: fx.GraphModule,
    node: fx.Node,
    behind: tuple[fx.GraphModule, dict[fx.Node, fx.Node]] | None = None,
) -> list[tuple[fx.GraphModule, fx.Node]]:
    """Find where the one element of a tensor is taken; nothing, if it is read in another way."""
    items: list[tuple[fx.GraphModule, fx.Node]] = []
    for user in node.users:
        if user.op == "output" and behind is not None and node in behind[1]:
            within = _items_of(behind[0], behind[1][node])
            if not within:
                return []
            items += within
            continue
        if user.op == "call_method" and user.target == "item":
            items.append((module, user))
            continue
        if user.target not in _BODIES:
            return []
        body, operands = cast("fx.Node", user.args[0]), user.args[_BODIES[user.target] :]
        inner = cast("fx.GraphModule", getattr(module, str(body.target)))
        for at, placeholder in enumerate(inner.graph.find_nodes(op="placeholder")):
            if operands[at] is node:
                within = _items_of(inner, placeholder, _behind(module, user, inner))
                if placeholder.users and not within:
                    return []
                items += within
    return items


def _is_sized(node: fx.Node) -> bool:
    example = _example(node)
    return isinstance(example, torch.Tensor) and any(
        isinstance(number, torch.SymInt) for number in (*example.shape, *example.stride())
    )


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")
