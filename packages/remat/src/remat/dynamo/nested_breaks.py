"""Breaks in what a forward calls, where it asks for a gradient across one.

TorchDynamo ends the graphs of all callers at a break in a called function, which has graphs of its
own then: what the callers go on with begins a further one. A gradient that the forward asks for
there, of what the called function computed, is in no graph then. By its setting
`nested_graph_breaks` Dynamo goes on in all of them at once. With it, torch 2.13 loses what callers
print before a break, keeps their values until they return, and gives a wrong value to what C code
calls, as `map` does. So it is set for models that need it alone; and it goes on only where a
caller's instruction is the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.variables import GetAttrVariable
from torch._dynamo.variables.nn_module import NNModuleVariable, UnspecializedNNModuleVariable

__all__ = [
    "ALONE",
    "MODULES",
    "NESTED",
    "Across",
    "go_on_only_in_calls",
    "note_call",
]

_HAS_IT = torch.__version__ >= "2.13"  # torch compares the parts
ALONE = {"nested_graph_breaks": False} if _HAS_IT else {}
NESTED = {"nested_graph_breaks": True} if _HAS_IT else ALONE
_ASKED_ACROSS = "autograd.grad with external grad_fn"  # as Dynamo names such a break
_CALLED = "remat_called"
MODULES = NNModuleVariable, UnspecializedNNModuleVariable
_OF_COMPREHENSION = ".0"  # which Python 3.11 calls as a function, by a name that Dynamo changes
_RESUMED = "torch_dynamo_resume_in"


class Across:
    """Whether a model was seen to ask for a gradient across a break, and this torch can go on."""

    def __init__(self) -> None:
        self.asked = self._is_news = False

    def see(self, breaks: Iterable[str]) -> None:
        """See the reasons of breaks."""
        if _HAS_IT and not self.asked and any(each.startswith(_ASKED_ACROSS) for each in breaks):
            self.asked = self._is_news = True

    def is_news(self) -> bool:
        """Whether it was so seen since this was last asked."""
        is_news, self._is_news = self._is_news, False
        return is_news


def note_call(original: Any) -> Any:
    """Note of each frame that is traced what the instruction under way calls."""

    def call_function(self: Any, called: Any, *rest: Any) -> Any:
        before = getattr(self, _CALLED, None)
        setattr(self, _CALLED, called)
        try:
            return original(self, called, *rest)
        finally:
            setattr(self, _CALLED, before)

    return call_function


def go_on_only_in_calls(original: Any) -> Any:
    """Let tracing go on in a called frame only if what it returns is what the call gives.

    And if Dynamo would compile that frame by itself: not in torch's code for hooks.
    """

    def may_go_on(self: Any) -> Any:
        called = getattr(self.parent, _CALLED, None)
        code = self.funcvar.get_code()
        is_theirs = code.co_name.startswith(_RESUMED) or not trace_rules.check(code)
        is_call = called is not None and _is_called(self.funcvar, called)
        return (
            is_call and is_theirs and _OF_COMPREHENSION not in code.co_varnames and original(self)
        )

    return may_go_on


def _is_called(function: Any, called: Any) -> bool:
    called = called.realize()
    if isinstance(called, GetAttrVariable) and isinstance(called.obj, MODULES):
        part = getattr(getattr(called.obj, "value", None), called.name, None)
        return isinstance(part, torch.nn.Module)
    if isinstance(called, MODULES):
        return True
    return hasattr(called, "get_code") and called.get_code() is function.get_code()
