"""Who takes the gradients of a backward under way, as autograd's graph has it.

These are functions of the node of a step's forward. Behind it stand the nodes of its groups, and
behind those the nodes that take the gradients of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["any_stays", "unwanted_inputs"]


def unwanted_inputs(node: Any, groups: Sequence[Sequence[str]]) -> frozenset[str]:
    """Find the inputs whose gradients the backward under way gives to nobody.

    `autograd.grad` and `backward(inputs=)` ask for those of some tensors alone.
    """
    takers = _takers(node, groups)
    return frozenset(name for name, taker in takers if taker is not None and not _will_run(taker))


def any_stays(node: Any, groups: Sequence[Sequence[str]], leaving: frozenset[str]) -> bool:
    """Whether a gradient that is to leave goes to no hook that may let go of it.

    As where `autograd.grad` asks for it, or the hook was removed.
    """
    if not leaving:
        return False
    return any(
        not getattr(getattr(taker, "variable", None), "_post_accumulate_grad_hooks", None)
        or _is_asked_for(taker)
        for name, taker in _takers(node, groups)
        if name in leaving and taker is not None
    )


def _takers(node: Any, groups: Sequence[Sequence[str]]) -> list[tuple[str, Any]]:
    """Pair the inputs with the nodes of autograd's graph that take their gradients.

    Behind the node of the forward, which is given, is one for each group.
    """
    takers = []
    for at, group in enumerate(groups):
        node = node.next_functions[0][0]
        behind = node.next_functions[at < len(groups) - 1 :]  # after the token of the next group
        takers += [(name, taker) for name, (taker, _) in zip(group, behind, strict=True)]
    return takers


def _will_run(node: Any) -> bool:
    return _is_asked_for(node) or torch._C._will_engine_execute_node(node)


def _is_asked_for(node: Any) -> bool:
    """Whether it is that of a leaf whose gradient `autograd.grad` gives back."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
    return False
