"""Deques with a `maxlen` that the forward fills, such as of the last few states.

TorchDynamo takes a deque that is there before the forward to have no bound: what the forward
appends to a full one would stand beside what had to go.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.lists import DequeVariable

__all__ = ["know_bound", "write_within_bound"]


def know_bound(original: Any) -> Any:
    """Have Dynamo know and guard the bound of a deque."""

    def wrap(self: Any, value: Any) -> Any:
        made = original(self, value)
        if type(value) is deque and value.maxlen == 0:
            unimplemented(
                gb_type="a deque with maxlen=0",
                context=str(self.source),
                explanation="What is appended to it would stay (torch 2.13).",
                hints=[],
            )
        if type(value) is deque and value.maxlen is not None and isinstance(made, DequeVariable):
            made.maxlen = ConstantVariable.create(value.maxlen)
            install_guard(AttrSource(self.source, "maxlen").make_guard(GuardBuilder.CONSTANT_MATCH))
        return made

    return wrap


def write_within_bound(original: Any) -> Any:
    """Write to a deque after a graph what is in it then: Dynamo breaks where there is a bound."""

    def codegen_update_mutated(self: Any, *rest: Any, **named: Any) -> Any:
        changed = [each for each in self._get_modified_vars() if isinstance(each, DequeVariable)]
        bounds = [each.maxlen for each in changed]
        for each in changed:
            each.maxlen = ConstantVariable.create(None)
        try:
            return original(self, *rest, **named)
        finally:
            for each, bound in zip(changed, bounds, strict=True):
                each.maxlen = bound

    return codegen_update_mutated
