"""A graph that TorchDynamo found, cut into parts where outputs are there.

Between two parts stands autograd: the gradient of such an output is whole there. What a later part
reads of an earlier one is returned by that and handed to it; all runs in the order of the graph. A
size is computed in each part that reads it. A cut within a context, as of autocast, comes after it,
and one before memory is changed in place that was made before it, after that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.utils import _pytree as pytree

from remat_graph.torch import computes_gradients

__all__ = ["GraphParts", "cut_at"]

Call = Callable[..., Sequence[Any]]

_NUMBERS = int, float, torch.SymInt, torch.SymFloat, torch.SymBool
_SIZES = frozenset({"size", "stride", "numel", "dim", "storage_offset"})


@dataclass(frozen=True, slots=True)
class GraphPart:
    """A part, and what it takes and returns: nodes of the whole graph; `last` are read no more."""

    graph: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    last: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class GraphParts:
    """The parts of a graph, in order."""

    graph: fx.GraphModule
    parts: tuple[GraphPart, ...]

    def run(self, calls: Sequence[Call], inputs: Sequence[Any]) -> Any:
        """Give what the graph returns, by a call of each part."""
        placeholders = self.graph.graph.find_nodes(op="placeholder")
        values = dict(zip(placeholders, inputs, strict=True))
        del inputs
        for part, call in zip(self.parts, calls, strict=True):
            taken = [values[node] for node in part.inputs]
            for node in part.last:
                del values[node]
            values.update(zip(part.outputs, call(*taken), strict=True))
            del taken
        return fx.map_arg(self.graph.graph.output_node().args[0], values.__getitem__)


def cut_at(graph: fx.GraphModule, outputs: Collection[int]) -> GraphParts | None:
    """Cut a graph where these of the tensors that it returns are there; `None` if it cannot be.

    A graph that computes gradients cannot: autograd has noted nothing of what another part ran.
    """
    if not outputs or computes_gradients(graph):
        return None
    nodes = [n for n in graph.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    returned = pytree.tree_leaves(graph.graph.output_node().args[0])
    tensors = [leaf for leaf in returned if isinstance(leaf, fx.Node) and _is_tensor(leaf)]
    if max(outputs) >= len(tensors):
        return None
    asked = {tensors[at] for at in outputs}
    changing = _last_changes(nodes)
    part_of: dict[fx.Node, int] = {}
    at, is_due, open_contexts, changed = 0, False, 0, set[fx.Node]()
    for node in nodes:
        part_of[node] = at
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and not _is_tensor(source) and source in part_of:
            part_of[node] = part_of[source]
        is_due = is_due or node in asked
        open_contexts = _open_after(node, open_contexts)
        changed = {last for last in (*changed, changing.get(node, node)) if last not in part_of}
        if is_due and not open_contexts and not changed:
            at, is_due = at + 1, False
    last = max(part_of.values(), default=0)
    if last == 0:
        return None
    try:
        return _cut(graph, part_of, last + 1)
    except _NotCut:
        return None


class _NotCut(Exception):
    """A part reads of an earlier one what is neither a tensor nor a size."""


def _last_changes(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Pair what makes memory that is changed in place with the last node that changes it.

    Where not all changes are told by their names, that is the last node that may be one.
    """
    of_memory: dict[int, list[fx.Node]] = {}
    changes: dict[int, int] = {}
    for node in nodes:
        target = node if _is_tensor(node) else node.args[0] if node.args else None
        example = target.meta.get("example_value") if isinstance(target, fx.Node) else None
        if _has_memory(example):
            memory = example.untyped_storage()._cdata
            if target is node or memory in of_memory:
                of_memory.setdefault(memory, []).append(node)
                changes[memory] = example._version
    last = {}
    for memory, found in of_memory.items():
        if changes[memory]:
            named = [node for node in found if _changes_in_place(node)]
            last[found[0]] = (named if len(named) == changes[memory] else found)[-1]
    return last


def _has_memory(example: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor that lies in memory: within `vmap` and the like there are others."""
    if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(example)


def _changes_in_place(node: fx.Node) -> bool:
    """Whether the name of what is called says that it changes its first argument in place."""
    name = str(getattr(node.target, "__name__", node.target))
    in_python = getattr(operator, name, None) is node.target and name.startswith("i")
    return in_python or name == "setitem" or (name.endswith("_") and not name.endswith("__"))


def _open_after(node: fx.Node, before: int) -> int:
    """Count the contexts that are open after a node."""
    if node.target is torch._C._set_grad_enabled:
        return before + (-1 if node.args[0] else 1)
    name = getattr(node.target, "__name__", "")
    begins = name.startswith("_enter_") or name.endswith("_increment_nesting")
    return before + begins - (name.startswith("_exit_") or name.endswith("_decrement_nesting"))


def _cut(graph: fx.GraphModule, part_of: dict[fx.Node, int], count: int) -> GraphParts:
    placeholders = graph.graph.find_nodes(op="placeholder")
    of_part: list[list[fx.Node]] = [[] for _ in range(count)]
    for node, at in part_of.items():
        of_part[at].append(node)
    reads = [_inputs(nodes, at, part_of) for at, nodes in enumerate(of_part)]
    last_read = {node: at for at, found in enumerate(reads) for node in found}
    handed = set(graph.graph.output_node().all_input_nodes)
    parts = []
    for at, nodes in enumerate(of_part):
        order = [n for n in placeholders if n in reads[at] or _is_number(n)]
        order += [n for n in part_of if n in reads[at] and part_of[n] < at]
        outputs = [n for n in nodes if n in handed or last_read.get(n, at) > at]
        last = [n for n in order if n not in handed and last_read.get(n, -1) == at]
        written = _written(graph, order, nodes, outputs)
        parts.append(GraphPart(written, tuple(order), tuple(outputs), tuple(last)))
    return GraphParts(graph, tuple(parts))


def _inputs(nodes: list[fx.Node], at: int, part_of: dict[fx.Node, int]) -> set[fx.Node]:
    """Find what a part reads of those before it, and of the inputs."""
    found: set[fx.Node] = set()
    waiting = [source for node in nodes for source in node.all_input_nodes]
    while waiting:
        source = waiting.pop()
        if source.op == "get_attr" or part_of.get(source, -1) == at or source in found:
            continue
        if source.op == "placeholder" or _is_tensor(source):
            found.add(source)
        elif _is_size(source):
            waiting += source.all_input_nodes
        else:
            raise _NotCut
    return found


def _written(
    graph: fx.GraphModule, inputs: list[fx.Node], nodes: list[fx.Node], outputs: list[fx.Node]
) -> fx.GraphModule:
    """Write the graph of a part."""
    own, copies = fx.Graph(), dict[fx.Node, fx.Node]()

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = own.node_copy(node, copy_of)  # of a size, or an attribute
        return copies[node]

    for node in inputs:
        if node.op == "placeholder":
            copies[node] = own.node_copy(node)
        else:
            copies[node] = own.placeholder(node.name)
            copies[node].meta = dict(node.meta)
    for node in nodes:
        copy_of(node)
    own.output(tuple(copies[node] for node in outputs))
    written = fx.GraphModule(graph, own)
    written.meta.update(graph.meta)
    return written


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), _NUMBERS)


def _is_size(node: fx.Node) -> bool:
    """Whether a node computes a size, or a number of numbers, which any part can do again."""
    if node.op == "call_method":
        return node.target in _SIZES
    sources = node.all_input_nodes
    return _is_number(node) and node.op == "call_function" and all(map(_is_number, sources))
