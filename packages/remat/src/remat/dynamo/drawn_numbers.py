"""Numbers that the forward draws by Python's `random`: inputs of a graph, or breaks of it.

TorchDynamo has such a number as a tensor of one element. A tensor is not a number where torch
promotes types or makes a tensor of it: `mask * random.random()` would be of 64 bits. So it may
only scale, shift or be compared with a tensor that has its own type. Where it is used otherwise,
the functions of `random` break the graph, and what they draw is a number.
"""

from __future__ import annotations

import random
from types import CodeType
from typing import Any

import torch
from torch._dynamo import guards
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.source import RandomValueSource
from torch._dynamo.variables import SkipFunctionVariable, UserDefinedObjectVariable
from torch.fx import Node

__all__ = ["DrawnNumbers"]

_DRAWING = random.random, random.randint, random.randrange, random.uniform
_IS_DRAWN = "remat_drawn"
_NAMES = frozenset({"mul", "add", "sub", "truediv", "div", "lt", "le", "gt", "ge"})
_AS_NUMBERS = _NAMES | {"i" + name for name in _NAMES}


class DrawnNumbers:
    """What is found of numbers that are drawn while one frame is compiled, over its restarts."""

    def __init__(self) -> None:
        self._breaks: set[CodeType] = set()  # frames whose draws are breaks

    def draw(self, original: Any) -> Any:
        """Have the functions of `random` draw before each call of a graph: inputs are numbers then.

        Dynamo 2.13 has this, and breaks the graph all the same. Of a generator of the user's own
        it draws but once, and takes the number for all calls: that is a break instead.
        """

        def wrap(self_: Any, value: Any) -> Any:
            if any(value is function for function in _DRAWING):
                self_.install_guards(guards.GuardBuilder.ID_MATCH)
                breaks = self_.tx.output.root_tx.f_code in self._breaks
                kind = SkipFunctionVariable if breaks else UserDefinedObjectVariable
                return kind(value, source=self_.source)
            if type(value) is random.Random:
                return self_.wrap_user_defined(value)
            return original(self_, value)

        return wrap

    def watch(self, original: Any) -> Any:
        """Trace anew, with breaks, where a call would take what is drawn for another tensor."""

        def create_proxy(
            tracer: Any, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any
        ) -> Any:
            proxy = original(tracer, kind, target, args, kwargs, *rest, **named)
            node = proxy.node
            drawn = [each for each in node.all_input_nodes if _is_drawn(each)]
            if drawn and node.op != "output":
                if not _takes_numbers(node, drawn):
                    self._breaks.add(tracer.output_graph.root_tx.f_code)
                    raise RestartAnalysis(restart_reason="a number is drawn by random")
                node.meta[_IS_DRAWN] = len(drawn) == len(node.all_input_nodes)
            return proxy

        return create_proxy


def _is_drawn(node: Node) -> bool:
    argument = node.meta.get("grapharg")
    return node.meta.get(_IS_DRAWN, False) or isinstance(
        getattr(argument, "source", None), RandomValueSource
    )


def _takes_numbers(node: Node, drawn: list[Node]) -> bool:
    """Whether a call gives what it would with the numbers themselves in the place of `drawn`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name not in _AS_NUMBERS or node.kwargs:
        return False
    values = [each.meta.get("example_value") for each in node.all_input_nodes if each not in drawn]
    if values:  # of a tensor with dimensions, the type is the tensor's
        return all(
            isinstance(each, torch.Tensor) and each.is_floating_point() and each.dim() > 0
            for each in values
        )
    return all(each.meta["example_value"].is_floating_point() for each in drawn)
