"""Gradients that the forward computes itself: `torch.autograd.grad` as part of a graph.

Forces of a learnt potential, gradient penalties, equations of physics, inner steps, hooks that
solve for a gradient: TorchDynamo has such a call in a graph if it is told to, and AOTAutograd
traces through it. What neither sees to is seen to here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.variables import GradModeVariable, TensorVariable
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import has_side_effect

from remat_graph.torch import CaptureError, computes_gradients

__all__ = [
    "TRACED",
    "AskedInputs",
    "allow_made_before",
    "break_at_backward",
    "leave_out_leaves",
    "let_differentiate_again",
    "note_switches",
]

_SETTING = "trace_autograd_ops"
TRACED = {_SETTING: True} if hasattr(config, _SETTING) else {}
_HOOKED = (
    "the forward asks torch.autograd.grad for the gradient of {}, which has a hook, or retains its "
    "gradient: a plan would not call the one nor add to the other"
)
_RELATED = (
    "the forward asks torch.autograd.grad for the gradient of {}, of which another of its inputs "
    "was made before the call: what comes through that one a plan would leave out"
)
_BEFORE_BREAK = "__nested_frame_values"  # torch 2.13
_KEYS = re.compile(r"\['([^']+)'\]")
_CUSTOM = torch.ops.higher_order.autograd_function_apply
_SWITCH = torch._C._set_grad_enabled
_SWITCHES = "remat_switches_gradients"


def break_at_backward(original: Any) -> Any:
    """Let `backward()` in a forward run between graphs: it calls hooks, and adds to `.grad`."""

    def method_backward(*args: Any, **kwargs: Any) -> Any:
        with config.patch({_SETTING: False}):
            return original(*args, **kwargs)

    return method_backward


def allow_made_before(_: Any) -> Any:
    """Let a gradient depend on inputs that were made before, as behind a break of the graph.

    Dynamo breaks there: autograd may go on through what made them, to what is asked for. Where it
    does, `AskedInputs` refuses the call.
    """
    return lambda tensor: set()


def leave_out_leaves(original: Any) -> Any:
    """Leave `requires_grad_()` on a value made in the graph out where it changes no output.

    AOTAutograd drops it, so Dynamo breaks the graph there: in each step of a model with adapters
    whose embedding has the hook that PEFT and transformers add. It stays a break if a returned
    value, or that very value, would require no gradient without it. It stays in a graph that
    computes gradients, which may be of that value.
    """

    def check(self: Any, returned: Any, tx: Any) -> None:
        leaves = [
            variable.as_proxy().node
            for variable in self.leaf_var_creation_order
            if isinstance(variable, TensorVariable) and not variable.source
        ]
        values = [node.meta["example_value"] for node in leaves]
        if not all(_is_same_without(variable, values) for variable in returned):
            original(self, returned, tx)
        elif not _computes_gradients(self):
            for node in _calls_of(self.graph, leaves):
                self.graph.erase_node(node)

    return check


def _computes_gradients(output_graph: Any) -> bool:
    """Whether a graph that Dynamo is making does."""
    own = output_graph.graph.find_nodes(op="call_function", target=torch.autograd.grad)
    parts = output_graph.nn_modules.values()
    return bool(own) or any(
        computes_gradients(part) for part in parts if isinstance(part, GraphModule)
    )


def _calls_of(graph: Graph, leaves: list[Node]) -> list[Node]:
    """List the calls of `requires_grad_`, between two that allow it and forbid it again."""
    calls = [node for node in graph.nodes if node.target == "requires_grad_"]
    return [
        each for node in calls if node.args[0] in leaves
        for each in (node.next, node, node.prev)
    ]  # fmt: skip


def _is_same_without(variable: Any, leaves: list[torch.Tensor]) -> bool:
    """Whether a returned value requires a gradient, or none, whether or not `leaves` do."""
    if not isinstance(variable, TensorVariable) or not variable.requires_grad:
        return True
    functions = _behind(variable.as_proxy().node.meta["example_value"])
    ends = (getattr(function, "variable", None) for function in functions)
    return any(end is not None and all(end is not leaf for leaf in leaves) for end in ends)


def _behind(tensor: torch.Tensor) -> set[Any]:
    """Collect the functions that autograd runs for the gradient of a tensor."""
    waiting, seen = [tensor.grad_fn], set[Any]()
    while waiting:
        function = waiting.pop()
        if function is not None and function not in seen:
            seen.add(function)
            waiting += [following for following, _ in function.next_functions]
    return seen


def note_switches(original: Any) -> Any:
    """Note of the backward of a custom `autograd.Function` whether it switches gradients on or off.

    Within the `no_grad` that Dynamo puts around it, its graph does not tell.
    """

    def trace_backward_graph(*args: Any, **kwargs: Any) -> Any:
        create, switches = vars(GradModeVariable)["create"], list[Any]()  # a static method

        def noted(tx: Any, value: Any, initialized: bool = False, **rest: Any) -> Any:
            if not initialized:  # else Dynamo's own
                switches.append(value)
            return create(tx, value, initialized, **rest)

        kind: Any = GradModeVariable
        kind.create = staticmethod(noted)
        try:
            traced = original(*args, **kwargs)
        finally:
            kind.create = create
        for node in traced[2].nodes:
            node.meta[_SWITCHES] = bool(switches)
        return traced

    return trace_backward_graph


def let_differentiate_again(module: GraphModule) -> None:
    """Let the backward of a custom `autograd.Function` be differentiated again, as in eager.

    Dynamo has it under `no_grad`: gradients of its gradients are lost, without a word. A backward
    that switches gradients itself, as `once_differentiable` does, refuses it.
    """
    parts = [part for part in module.modules() if isinstance(part, GraphModule)]
    for part in parts:
        for node in part.graph.find_nodes(op="call_function", target=_CUSTOM):
            backward: Any = node.args[1]
            _without_no_grad(part.get_submodule(backward.target))


def _without_no_grad(backward: Any) -> None:
    graph = backward.graph
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    ends = calls[:1] + calls[-1:]
    if [(node.target, node.args) for node in ends] != [(_SWITCH, (False,)), (_SWITCH, (True,))]:
        return
    if any(node.meta.get(_SWITCHES) for node in graph.nodes):
        with graph.inserting_before(ends[0]):
            graph.call_function(_refuse_to_differentiate_again)
    else:
        for node in ends:
            graph.erase_node(node)
    backward.recompile()


@has_side_effect
def _refuse_to_differentiate_again() -> None:
    if torch.is_grad_enabled():
        raise CaptureError(
            "create_graph=True asks for a gradient through a custom autograd.Function whose "
            "backward switches gradients off or on, by once_differentiable or no_grad; a graph "
            "does not tell what of it can be differentiated again: write it without"
        )


class AskedInputs:
    """The inputs of a graph whose gradients it may compute, by position, with their names."""

    def __init__(self, module: GraphModule) -> None:
        asked = set[Node]()
        if computes_gradients(module):
            for node in module.graph.nodes:
                if node.target is torch.autograd.grad or _runs_such(module, node):
                    asked.update(node.all_input_nodes)
        placeholders = module.graph.find_nodes(op="placeholder")
        self._names = {at: _name_of(node) for at, node in enumerate(placeholders) if node in asked}

    def refusal(self, inputs: Sequence[Any]) -> str | None:
        """Say why the graph gives something else for these inputs than autograd does, if it does.

        Autograd calls the hooks of what it is asked for, adds to `.grad` of what retains it, and
        goes on through what made another input of it.
        """
        asked = {at: inputs[at] for at in self._names if isinstance(inputs[at], torch.Tensor)}
        for at, tensor in asked.items():
            if tensor._backward_hooks or tensor.retains_grad:
                return _HOOKED.format(self._names[at])
        for made in inputs if asked else ():
            if isinstance(made, torch.Tensor) and made.grad_fn is not None:
                before = _behind(made) - {made.grad_fn}
                ends = [getattr(function, "variable", None) for function in before]
                for at, tensor in asked.items():
                    if tensor.grad_fn in before or any(end is tensor for end in ends):
                        return _RELATED.format(self._names[at])
        return None


def _runs_such(module: GraphModule, node: Node) -> bool:
    """Whether a node runs a graph that computes gradients, of a checkpoint or later of a hook."""
    read = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    parts = (getattr(module, name, None) for name in read)
    return any(isinstance(part, GraphModule) and computes_gradients(part) for part in parts)


def _name_of(node: Node) -> str:
    """Name an input as the forward does."""
    origin = node.meta.get("grapharg")
    source = "" if origin is None or origin.source is None else str(origin.source.name)
    if _BEFORE_BREAK in source:
        return "a value from before a break"
    keys = [key for key in _KEYS.findall(source) if key != "self"]
    return ".".join(keys) or node.name
