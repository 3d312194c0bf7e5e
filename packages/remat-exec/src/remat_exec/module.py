"""A captured and planned module as a module: for use without the one-line API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat_exec.executable import Executable
from remat_graph import Schedule
from remat_graph.torch import Capture, GuardMiss, original_forward, read_call

__all__ = ["RematModule"]


class RematModule(torch.nn.Module):
    """Runs `module` by a schedule of its captured graph.

    In eval mode or without gradients it runs the module as it is. A call that differs from what
    was captured raises; it never runs the stale plan.

    Raises:
        InvalidSchedule: if the simulator rejects the schedule.
    """

    def __init__(self, module: torch.nn.Module, capture: Capture, schedule: Schedule) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.executable = Executable(capture, schedule)
        state = capture.state
        self._check: Callable[[], str | None] = (
            (lambda: None) if state is None else state.bind(module)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward.

        Raises:
            GuardMiss: if inputs, mode or module differ from what was captured.
        """
        if not (self.training and torch.is_grad_enabled()):
            return original_forward(self.module)(*args, **kwargs)
        call = read_call(args, kwargs, self.module)
        capture = self.executable.capture
        reason = capture.signature.difference(call.signature) or self._check()
        if reason is not None:
            raise GuardMiss(f"{reason}; capture and plan again for this call")
        outputs = self.executable(self.module, call.tensors)
        return capture.output_structure.rebuild(iter(outputs))
