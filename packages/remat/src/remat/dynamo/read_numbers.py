"""Whole numbers that the forward reads out of its inputs, as `int(batch.max()) + 1`.

TorchDynamo breaks the graph where a tensor becomes a number. One that is read of an input, through
a maximum, a minimum, a sum or a position, is known before the graph runs: it is read there, and is
a number of the call as a size is, which becomes a symbol where it changes. It is not where anything
so far may have written to what is read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource, GetItemSource
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, builder
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._guards import Source
from torch.fx import Node

__all__ = ["ReadNumbers"]

_WHOLE = torch.int64, torch.int32
_READS = frozenset({"max", "min", "sum"})
_FUNCTIONS = {torch.max: "max", torch.min: "min", torch.sum: "sum"}
_SUMS: dict[Any, Any] = {operator.add: operator.add, operator.sub: operator.sub,
                         "add": operator.add, "sub": operator.sub}  # fmt: skip
_SMALL = 1 << 16  # what is added in 64 bits without an overflow, as Python adds it
_MOST = 3  # numbers of a frame: each may choose a branch, and all choices are traced
_OF_TORCH = "torch", "_operator", "builtins", "math"
_IN_PLACE = frozenset({
    operator.setitem, operator.delitem, operator.iadd, operator.iand, operator.iconcat,
    operator.ifloordiv, operator.ilshift, operator.imatmul, operator.imod, operator.imul,
    operator.ior, operator.ipow, operator.irshift, operator.isub, operator.itruediv, operator.ixor,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Number:
    """How a tensor is read out of an input, what it is in this call, and what is added then.

    `path` are the nodes from the input on.
    """

    source: Source
    value: torch.Tensor
    path: tuple[Node, ...]
    then: tuple[tuple[Any, int], ...] = ()


class ReadNumbers:
    """What is found of numbers that are read while one frame is compiled."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def read(self, original: Any) -> Any:
        """Take the number of a tensor that is read out of an input for a number of the call."""

        def method_item(self_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            found = None
            if not args and not kwargs and tx.output.current_tracer is tx.output.root_tracer:
                found = _read(self_.as_proxy().node)
            if found is None or not self._may_be_read(found):
                return original(self_, tx, *args, **kwargs)
            read = builder.VariableBuilder(tx, _called(found.source, "item"))(found.value.item())
            number = _without_source(read)
            for operation, other in found.then:
                both = [number, ConstantVariable.create(other)]
                number = BuiltinVariable(operation).call_function(tx, both, {})
            return number

        return method_item

    def _may_be_read(self, found: _Number) -> bool:
        name = str(found.source.name)
        is_met = name in self._names or len(self._names) < _MOST
        if found.value.numel() != 1 or not is_met or _may_be_written(found):
            return False
        self._names.add(name)
        return True


def _without_source(read: Any) -> Any:
    """Give a number that is no more read where it is from: that may have changed by then."""
    if isinstance(read, SymNodeVariable):
        return SymNodeVariable(read.proxy, read.sym_num)
    return ConstantVariable.create(read.as_python_constant())


def _read(node: Node) -> _Number | None:
    if node.op == "placeholder":
        return _read_input(node)
    if node.kwargs or not node.args or not isinstance(node.args[0], Node):
        return None
    read = _read(node.args[0])
    if read is None:
        return None
    source, value, path = read.source, read.value, (*read.path, node)
    target: Any = node.target
    others = node.args[1:]
    name = target if node.op == "call_method" else _FUNCTIONS.get(target)
    if name in _READS and not others and not read.then and value.numel():
        return _Number(_called(source, name), getattr(value, name)(), path)
    other = others[0] if len(others) == 1 else None
    if type(other) is not int:
        return None
    if target is operator.getitem and not read.then:
        return _Number(GetItemSource(source, other), value[other], path)
    if target in _SUMS and value.dtype is torch.int64 and abs(other) < _SMALL:
        return _Number(source, value, path, (*read.then, (_SUMS[target], other)))
    return None


def _called(source: Source, name: str) -> Source:
    return CallFunctionNoArgsSource(AttrSource(source, name))


def _read_input(node: Node) -> _Number | None:
    given, value = node.meta.get("grapharg"), _given(node)
    if given is None or given.source is None or type(value) is not torch.Tensor:
        return None
    is_whole = value.dtype in _WHOLE and not value.is_meta
    return _Number(given.source, value, (node,)) if is_whole else None


def _given(node: Node) -> torch.Tensor | None:
    """Give the tensor of this call that an input is."""
    value = getattr(node.meta.get("grapharg"), "example", None)
    return value if isinstance(value, torch.Tensor) else None


def _may_be_written(found: _Number) -> bool:
    """Whether the graph so far may have changed what is read, or something on the way to it."""
    examples = [node.meta["example_value"] for node in found.path]
    if any(example._version for example in examples):
        return True
    read = set(map(_traced_memory, examples))
    begin, end = _memory(found.path[0])
    nodes = found.path[0].graph.nodes
    written = {memory for node in nodes if not _is_pure(node) for memory in _touched(node)}
    for node in nodes:
        if node.op == "placeholder" and _given(node) is not None:
            example = node.meta["example_value"]
            first, last = _memory(node)
            if first < end and begin < last:
                read.add(_traced_memory(example))
            if example._version:
                written.add(_traced_memory(example))
    return not read.isdisjoint(written)


def _touched(node: Node) -> Iterator[int | None]:
    """List the memory of what a node is given."""
    for given in node.all_input_nodes:
        example = given.meta.get("example_value")
        if isinstance(example, torch.Tensor):
            yield _traced_memory(example)


def _traced_memory(example: torch.Tensor) -> int | None:
    memory: int | None = None
    if example.layout is torch.strided:
        memory = example.untyped_storage()._cdata
    return memory


def _memory(node: Node) -> tuple[int, int]:
    """Give the addresses between which an input of this call lies."""
    value = _given(node)
    if value is None or value.layout is not torch.strided or value.is_meta:
        return 0, 0
    storage = value.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _is_pure(node: Node) -> bool:
    """Whether a node writes to nothing, or to what has a version that tells."""
    target: Any = node.target
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if node.op == "call_method":
        return not str(target).endswith("_")
    if node.op != "call_function" or node.kwargs.get("out") is not None:
        return False
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable
    module = str(getattr(target, "__module__", None) or "torch").partition(".")[0]
    return (
        module in _OF_TORCH
        and target not in _IN_PLACE
        and not getattr(target, "__name__", "_").endswith("_")
        and not isinstance(target, (torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator))
    )
