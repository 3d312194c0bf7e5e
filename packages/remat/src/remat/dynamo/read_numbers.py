"""Whole numbers that the forward reads out of its inputs, as `int(batch.max()) + 1`.

TorchDynamo breaks the graph where a tensor becomes a number. One that is read of an input, through
a maximum, a minimum, a sum or a position, is known before the graph runs: it is read there, and is
a number of the call as a size is, which becomes a symbol where it changes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource, GetItemSource
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, builder
from torch._guards import Source
from torch.fx import Node

__all__ = ["read_before"]

_READS = frozenset({"max", "min", "sum"})
_FUNCTIONS = {torch.max: "max", torch.min: "min", torch.sum: "sum"}
_WHOLE = torch.int64, torch.int32
_SUMS: dict[Any, Any] = {operator.add: operator.add, operator.sub: operator.sub,
         "add": operator.add, "sub": operator.sub}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Number:
    """How a tensor is read out of an input, what it is in this call, and what is added then."""

    source: Source
    value: torch.Tensor
    then: tuple[tuple[Any, int], ...] = ()


def read_before(original: Any) -> Any:
    """Take the number of a tensor that is read out of an input for a number of the call."""

    def method_item(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        found = None
        if not args and not kwargs and tx.output.current_tracer is tx.output.root_tracer:
            found = _read(self.as_proxy().node)
        if found is None or found.value.numel() != 1:
            return original(self, tx, *args, **kwargs)
        number = builder.VariableBuilder(tx, _called(found.source, "item"))(found.value.item())
        for operation, other in found.then:
            both = [number, ConstantVariable.create(other)]
            number = BuiltinVariable(operation).call_function(tx, both, {})
        return number

    return method_item


def _read(node: Node) -> _Number | None:
    if node.op == "placeholder":
        return _read_input(node)
    if node.kwargs or not node.args or not isinstance(node.args[0], Node):
        return None
    read = _read(node.args[0])
    if read is None:
        return None
    target: Any = node.target
    others = node.args[1:]
    name = target if node.op == "call_method" else _FUNCTIONS.get(target)
    if name in _READS and not others and not read.then and read.value.numel():
        return _Number(_called(read.source, name), getattr(read.value, name)())
    if len(others) != 1 or type(others[0]) is not int:
        return None
    if target is operator.getitem and not read.then:
        return _Number(GetItemSource(read.source, others[0]), read.value[others[0]])
    if target in _SUMS:
        return _Number(read.source, read.value, (*read.then, (_SUMS[target], others[0])))
    return None


def _called(source: Source, name: str) -> Source:
    return CallFunctionNoArgsSource(AttrSource(source, name))


def _read_input(node: Node) -> _Number | None:
    given, example = node.meta.get("grapharg"), node.meta.get("example_value")
    if given is None or given.source is None or not isinstance(example, torch.Tensor):
        return None
    value = given.example
    if example.dtype not in _WHOLE or type(value) is not torch.Tensor or value.is_meta:
        return None
    memory = value.untyped_storage()._cdata
    written = [_memory(each) for each in node.graph.find_nodes(op="placeholder") if _written(each)]
    return None if memory in written else _Number(given.source, value)


def _written(node: Node) -> bool:
    """Whether the graph has written to an input by now."""
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example._version > 0


def _memory(node: Node) -> int | None:
    value = getattr(node.meta.get("grapharg"), "example", None)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    memory: int = value.untyped_storage()._cdata
    return memory
