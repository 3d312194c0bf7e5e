"""Which operators may run a second time, and which decide something that must stay decided.

Nothing says whether an operator that someone registered with torch gives the same twice: it may
draw from a generator of its own, count, or send. It runs once, unless it is declared
deterministic. Nor do these run twice: what draws a decision from numbers (which experts, which
elements, in what order), for where a device sums in another order the second time a tie falls the
other way and forward and backward disagree; and what the ranks of a group run together.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from remat_graph.torch.calls import Body
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.operators import operator_of

__all__ = ["allow_recompute", "is_collective", "may_run_again"]

_OF_TORCH = frozenset({"aten", "prims", "prim"})
_COLLECTIVE = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem"})
_allowed: set[str] = set()


def allow_recompute(name: str) -> None:
    """Declare an operator deterministic and without effects: plans made from now on may rerun it.

    `name` is what it is registered by, such as `"mylib::scan"`; of one overload alone,
    `"mylib::scan.out"`.

    Raises:
        CaptureError: if the name is not of this form, no operator has it yet, or it is that of a
            collective, which never runs twice.
    """
    namespace, _, operator = name.partition("::") if isinstance(name, str) else ("", "", "")
    if not namespace or not operator:
        raise CaptureError(f"allow_recompute({name!r}): give a name such as 'mylib::scan'")
    if namespace in _COLLECTIVE:
        raise CaptureError(f"{name} is a collective: ranks would wait for one another forever")
    if not _is_registered(namespace, operator):
        raise CaptureError(f"no operator {name!r} is registered; import what registers it first")
    _allowed.add(name)


def _is_registered(namespace: str, operator: str) -> bool:
    if namespace == "higher_order":
        return hasattr(torch.ops.higher_order, operator)
    name, dot, overload = operator.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet is not None and (not dot or overload in packet.overloads())


def may_run_again(target: Any, body: Body | None = None) -> bool:
    """Whether a plan may run this operator twice, and take two equal calls of it for one.

    A function is judged by its body, in which nothing may be drawn; without one it is taken to run
    once, unless its record says that it gives the same each time.
    """
    if body is not None:
        return all(
            call.random is None and may_run_again(call.target, call.body) for call in body.calls
        )
    names = _names(target)
    if not names:
        return operator_of(target).deterministic
    return bool(names & _allowed) or operator_of(target).deterministic or _decides_nothing(target)


def is_collective(target: Any, body: Body | None = None) -> bool:
    """Whether the ranks of a group run this operator, or a part of this body, together."""
    if body is not None:
        return any(is_collective(call.target, call.body) for call in body.calls)
    return _namespace(target) in _COLLECTIVE


@functools.lru_cache(4096)  # not without end: some are made for one graph
def _decides_nothing(target: Any) -> bool:
    return _namespace(target) in _OF_TORCH and not operator_of(target).decides


def _namespace(target: Any) -> str:
    return next((name.partition("::")[0] for name in _names(target)), "")


@functools.lru_cache(4096)
def _names(target: Any) -> frozenset[str]:
    """Give what an operator may be called: with its overload, and without."""
    if isinstance(target, torch._ops.OpOverload):
        overload = target._overloadname
        name = target._schema.name
        return frozenset({name, name if overload == "default" else f"{name}.{overload}"})
    if isinstance(target, torch._ops.HigherOrderOperator):
        return frozenset({f"higher_order::{target.__name__}"})
    return frozenset()
