"""Lazy modules, whose parameters get their shapes, and are drawn, in the first forward.

TorchDynamo draws them while it traces, and puts the generator back: what the forward draws then
would be the numbers that the parameters were drawn from. So the first call is a break, and runs as
in eager; from then on the module is an ordinary one.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.exc import unimplemented

__all__ = ["break_at_first_call"]

_LAZY = "_initialize_hook"  # which is there until the parameters are


def break_at_first_call(original: Any) -> Any:
    """Have Dynamo break where a lazy module is called that has no shapes yet."""

    def initialize_lazy_module(tx: Any, module: Any, *rest: Any) -> None:
        if hasattr(module, _LAZY):
            unimplemented(
                gb_type="Parameters without shapes",
                context=type(module).__name__,
                explanation=f"The first call of a {type(module).__name__} draws its parameters.",
                hints=[],
            )
        original(tx, module, *rest)

    return initialize_lazy_module
