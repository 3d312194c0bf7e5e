"""Each call of what `torch.compile` made with our back end: Dynamo asks it for graphs alone.

Where it finds none, the back end is never called. So Dynamo's own callback at the start of each
compilation looks for the call on the stack, and has its context tell of this and later calls.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.utils import counters

from remat.dynamo.graphs import frame_of_call
from remat.dynamo.reasons import first_lines
from remat_graph.torch import draws_otherwise, lstms_of_any_length

__all__ = ["watch_calls"]

Began = Callable[[object], Callable[[Any, Any, list[str]], None]]
"""Called with what stands for a `torch.compile` when a call of that begins.

What it returns is called when that call ends, with the result, the arguments, and why TorchDynamo
made no graphs meanwhile.
"""


class _Kept(list[Any]):
    """Callbacks of which the first stays where `torch._dynamo.reset` clears all."""

    def clear(self) -> None:
        """Take out all but the first."""
        del self[1:]


def watch_calls(backend: Any, began: Began) -> None:
    """Call `began` at each call of what `torch.compile` makes with this back end, for good.

    RNNs of a module that is compiled are part of its graphs, whatever Dynamo is set to, unless one
    draws otherwise than a trace does. The length of an LSTM may be a symbol of them.
    """
    before: list[tuple[bool, contextlib.ExitStack]] = []

    def starts(_: Any) -> None:
        frame = frame_of_call()
        held = {} if frame is None else frame.f_locals
        if "cleanups" not in held:
            return
        inner = innermost_backend(held["callback"])
        if getattr(inner, "compiler_fn", inner) is not backend:
            return
        stack = contextlib.ExitStack()
        before.append((config.allow_rnn, stack))
        stack.enter_context(lstms_of_any_length())
        module = getattr(inspect.unwrap(held["fn"]), "__self__", None)
        if isinstance(module, torch.nn.Module) and not draws_otherwise(module):
            config.allow_rnn = True
        hooks = held["self"].enter_exit_hooks
        if not any(isinstance(hook, _Watch) for hook in hooks):
            hooks.append(_Watch(held["callback"], began))
            held["cleanups"].append(hooks[-1]())

    def ends(_: Any) -> None:
        if before:
            config.allow_rnn, stack = before.pop()
            stack.close()

    callback_handler.start_callbacks = _Kept([starts, *callback_handler.start_callbacks])
    callback_handler.end_callbacks = _Kept([ends, *callback_handler.end_callbacks])


class _Watch:
    """A hook of one `torch.compile`, which its context calls at the start of each call."""

    def __init__(self, call: object, began: Began) -> None:
        self._call = call
        self._began = began

    def __call__(self) -> Callable[[], None]:
        """Begin a call; give what is called at its end."""
        ended, breaks = self._began(self._call), counters["graph_break"].copy()

        def ends() -> None:
            held = sys._getframe(1).f_locals
            if "result" in held:  # else it raises
                reasons = counters["graph_break"] - breaks
                ended(
                    held["result"], (held["args"], held["kwargs"]), list(map(first_lines, reasons))
                )

        return ends
