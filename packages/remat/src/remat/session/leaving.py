"""Gradients that hooks let go of at once, as those that step an optimizer in the backward.

Hooks are never run to see what they do: where a real backward ends, it shows whose gradients are
gone.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.planning.user_plan import PlanOrSchedule, UserPlan
from remat_exec import Ability, Executor, abilities_of
from remat_graph import leaves
from remat_graph.torch import Capture, tensor_at, tensors_of_call

__all__ = ["Hooked", "able_to_leave", "hooked", "may_leave", "watch_leaving"]

Hooked = dict[int, "weakref.ref[torch.Tensor]"]
"""Leaves with hooks, by the position of the input of the program that each is."""


def hooked(capture: Capture, module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> Hooked:
    """Find the inputs that get a gradient, and have a hook for when it is there.

    Those whose gradients are planned to leave are among them, whether they have one or not.
    """
    program, leaving = capture.program, capture.leaving_gradients
    found: Hooked = {}
    for position, item in enumerate(program.inputs):
        if item.variable in program.gradients:
            tensor = tensor_at(module, list(tensors), item.kind, item.key)
            has_hook = tensor.is_leaf and getattr(tensor, "_post_accumulate_grad_hooks", None)
            if has_hook or position in leaving:
                found[position] = weakref.ref(tensor)
    return found


def able_to_leave(
    executor: Executor, captured: Capture, graph: torch.fx.GraphModule, inputs: Sequence[Any]
) -> frozenset[int]:
    """Find the gradients that hooks may let go of at once, by the positions of their inputs."""
    if Ability.RELEASES_GRADIENTS not in abilities_of(executor):
        return frozenset()
    tensors, _ = tensors_of_call(inputs)
    return frozenset(hooked(captured, graph, tensors))


def may_leave(
    able: frozenset[int], seen: frozenset[int] | None, plan: PlanOrSchedule | None
) -> list[frozenset[int]]:
    """List which gradients to plan for as leaving, of those that can: each if none before fits.

    They are those that steps have `seen` to leave. Before one has, hooks are taken to let go only
    if need be, or if the user's plan says so: a step is held against the budget where it ends.
    """
    if seen is not None or not able:
        return [able & (seen or frozenset())]
    kinds = plan.plan.kinds if isinstance(plan, UserPlan) else ()
    if any(leaves(op.name) for kind in kinds for op in kind.front.graph.ops):
        return [able]
    return [frozenset(), able]


def watch_leaving(
    leaves_with_hooks: Hooked,
    see: Callable[[frozenset[int], frozenset[int]], None],
    calls: Counter[int] | None = None,
) -> None:
    """Tell, where the backward under way ends, whose gradients stayed and whose are gone.

    Of leaves whose gradients it does not accumulate, nothing is told. With `calls`, how many of a
    step have each leaf, by its `id`: one of several calls gets its gradient after the last of their
    backwards, so that it stayed; and so did one that `autograd.grad` gives back.
    """
    takers = {at: _accumulates(ref()) for at, ref in leaves_with_hooks.items()}
    watched = {at for at, accumulates in takers.items() if accumulates}
    if calls is not None:
        watched |= {at for at, accumulates in takers.items() if accumulates is None}

    def is_gone(at: int) -> bool:
        leaf = leaves_with_hooks[at]()
        if leaf is None or not leaf.is_leaf or not takers[at]:
            return False
        return leaf.grad is None and (calls is None or calls[id(leaf)] <= 1)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def ended() -> None:
        gone = frozenset(filter(is_gone, watched))
        see(frozenset(watched) - gone, gone)

    if watched:
        torch.autograd.Variable._execution_engine.queue_callback(ended)


def _accumulates(leaf: torch.Tensor | None) -> bool | None:
    """Whether the backward under way adds to the `.grad` of a leaf; `None` if it gives it back."""
    if leaf is None:
        return False
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # as `autograd.grad` does
        return None
