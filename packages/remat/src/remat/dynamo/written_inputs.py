"""Inputs that a graph writes to in place, and that have a gradient then.

Autograd has the write in its graph: what reads the tensor later hands its gradient to what was
written. The function that runs a plan has inputs and outputs alone. So the graph is made to write
to a copy, which it returns, and who calls it copies that into the input, as autograd sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["WrittenInputs"]

_HELD = (
    "it writes what has a gradient to {}, which the module holds and later code may read; write in "
    "torch.no_grad() what needs none"
)
_SHARED = (
    "it writes what has a gradient to an input of which it has, or returns, a view, or whose "
    "elements share memory; write to a copy"
)


@dataclass(frozen=True, slots=True)
class WrittenInputs:
    """Inputs whose new values a graph returns behind its results, by position.

    `refusal` says why a graph that writes to others is to run as it is.
    """

    positions: tuple[int, ...] = ()
    refusal: str | None = None

    @classmethod
    def of(cls, graph: fx.GraphModule, *, whole: bool) -> WrittenInputs:
        """Find those of a graph, and change it so.

        Of what a module holds, new values stay without a gradient in a `whole` graph: nothing in
        the forward reads them later.
        """
        if not torch.is_grad_enabled():
            return cls()
        placeholders = graph.graph.find_nodes(op="placeholder")
        written = [at for at, node in enumerate(placeholders) if _is_written(node)]
        held = [at for at in written if _is_of_module(placeholders[at])]
        positions = tuple(at for at in written if at not in held)
        if held and not whole:
            return cls(refusal=_HELD.format(placeholders[held[0]].name))
        if any(_is_shared(graph, placeholders[at]) for at in positions):
            return cls(refusal=_SHARED)
        if positions:
            _write_to_copies(graph, [placeholders[at] for at in positions])
        return cls(positions)

    def put(self, returned: Any, inputs: Sequence[Any]) -> Any:
        """Write new values into the inputs; give what the graph returned without them."""
        if not self.positions:
            return returned
        count = len(returned) - len(self.positions)
        for position, new in zip(self.positions, returned[count:], strict=True):
            tensor = inputs[position]
            if tensor.requires_grad and not tensor._is_view():
                tensor.detach_()  # else a gradient of zeros goes to what it was
            tensor.copy_(new)
        return type(returned)(returned[:count])


def _is_written(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return (
        isinstance(example, torch.Tensor)
        and example._version > 0
        and example.requires_grad
        and not example.is_leaf
        and example._version > _version_at_first(node)
    )


def _version_at_first(node: fx.Node) -> int:
    """Give the version that a stand-in begins with: setting it into a memory may count as one."""
    origin = node.meta.get("grapharg")
    if origin is None or not isinstance(origin.example, torch.Tensor):
        return 0
    return FakeTensorMode().from_tensor(origin.example, static_shapes=True)._version


def _is_of_module(node: fx.Node) -> bool:
    """Whether it is an attribute of a module, or of what is there in all calls."""
    origin = node.meta.get("grapharg")
    source = None if origin is None else origin.source
    return source is not None and source.guard_source != torch._guards.GuardSource.LOCAL


def _is_shared(graph: fx.GraphModule, written: fx.Node) -> bool:
    """Whether another input, a result, or another element lies in the memory of what is written."""
    if any(
        isinstance(stride, int) and not stride for stride in written.meta["example_value"].stride()
    ):
        return True
    others = [node for node in graph.graph.find_nodes(op="placeholder") if node is not written]
    others += graph.graph.output_node().all_input_nodes
    return any(_memory(node) == _memory(written) for node in others)


def _memory(node: fx.Node) -> int | None:
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return None
    memory: int = example.untyped_storage()._cdata
    return memory


def _write_to_copies(graph: fx.GraphModule, written: list[fx.Node]) -> None:
    output = graph.graph.output_node()
    copies = []
    with graph.graph.inserting_after(graph.graph.find_nodes(op="placeholder")[-1]):
        for node in written:
            copied = graph.graph.call_method("clone", (node,))
            copied.meta = {key: node.meta[key] for key in ("example_value",) if key in node.meta}
            for user in [user for user in node.users if user is not copied]:
                user.replace_input_with(node, copied)
            copies.append(copied)
    output.args = ((*output.args[0], *copies),)  # type: ignore[misc]
    graph.graph.lint()
    graph.recompile()
