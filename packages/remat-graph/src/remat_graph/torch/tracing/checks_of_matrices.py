"""Errors where a matrix is singular, in the operators themselves.

`torch.linalg.inv` and others run an operator that returns `info`, then another that raises. A trace
has the second as an effect, ordered by tokens that the graph is given and returns. The first can
raise as well, if it is asked to: then nothing is left of the second. It does not run
if nobody reads what else it returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors as roles
from torch.fx import Graph, Node

__all__ = ["raise_within_operators"]

aten = torch.ops.aten

_TOKENS = (roles.ForwardTokenAOTInput, roles.BackwardTokenAOTInput)


def raise_within_operators(graph: Graph) -> None:
    """Let operators of linear algebra raise, if no other operator of a joint graph has effects."""
    effects = [node for node in graph.nodes if node.target is torch.ops.higher_order.with_effects]
    factorisations = [node for effect in effects if (node := _factorisation(*effect.args))]
    if not effects or len(factorisations) < len(effects):
        return
    for factorisation in factorisations:
        factorisation.kwargs = {**factorisation.kwargs, "check_errors": True}
    tokens = [node for node in graph.find_nodes(op="placeholder") if _is_token(node.meta["desc"])]
    of_tokens = {*effects, *tokens, *(user for effect in effects for user in effect.users)}
    output = graph.output_node()
    pairs = zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
    kept = [(value, role) for value, role in pairs if value not in of_tokens]
    output.args = ([value for value, _ in kept],)
    output.meta = {**output.meta, "desc": [role for _, role in kept]}
    for node in reversed(list(graph.nodes)):
        if node in of_tokens:
            graph.erase_node(node)


def _is_token(role: Any) -> bool:
    return isinstance(role, _TOKENS)


def _factorisation(_: Any, operator: Any, info: Any, *__: Any) -> Node | None:
    """Find what made the `info` that an effect looks at, and is read besides; `None` if nothing."""
    is_check = operator is aten._linalg_check_errors.default and isinstance(info, Node)
    made_by = info.args[0] if is_check and info.args else None
    if not isinstance(made_by, Node) or all(user is info for user in made_by.users):
        return None
    schema = getattr(made_by.target, "_schema", None)
    may_raise = schema and any(each.name == "check_errors" for each in schema.arguments)
    return made_by if may_raise else None
