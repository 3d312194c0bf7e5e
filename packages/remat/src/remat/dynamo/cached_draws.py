"""Functions behind `functools.lru_cache` that draw, such as a random projection drawn once.

TorchDynamo runs the body of such a function at each call. Where it draws, that is another
projection in each step; so the graph breaks there, and the cache is asked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.exc import unimplemented
from torch.fx import Node

__all__ = ["break_where_it_draws"]


def break_where_it_draws(original: Any) -> Any:
    """Have Dynamo break where the body of a cached function draws, by torch or Python."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        output = tx.output
        nodes, drawn = len(output.graph.nodes), len(output.random_calls)
        result = original(self, tx, args, kwargs)
        if hasattr(self.wrapper_obj, "cache_info"):
            made = list(output.graph.nodes)[nodes:]
            if len(output.random_calls) > drawn or any(_draws(node) for node in made):
                name = getattr(self.wrapper_obj, "__qualname__", "")
                unimplemented(
                    gb_type="a cached function that draws",
                    context=name,
                    explanation=f"What {name} draws is kept by its cache.",
                    hints=[],
                )
        return result

    return call_function


def _draws(node: Node) -> bool:
    """Whether a call of torch's is of an operator that draws."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    operator = getattr(torch.ops.aten, name, None) if node.op.startswith("call_") else None
    overloads = [] if operator is None else operator.overloads()
    return any(
        torch.Tag.nondeterministic_seeded in getattr(operator, each).tags for each in overloads
    )
