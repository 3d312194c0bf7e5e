"""Outputs that the model reads itself, and who asks for their whole gradient.

Within a plan, what comes from outside and from the model's own reading is added up. Autograd sees
what comes from outside alone: so a hook on such an output, its `retain_grad`, and
`autograd.grad(loss, output)` would silently get a part. A backward that any of them asks is
refused. What is not seen: `autograd.grad(loss, [output, parameter])`.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from remat_exec.errors import BackwardError
from remat_graph.torch import Program

__all__ = ["OutputHooks", "read_within"]

aten = torch.ops.aten

_OURS = -1  # no number of a handle; to take one would tell of a new hook to all who count them
_INSTEAD = (
    "return a copy of it from the model (output.clone()) if what comes from outside is meant, or "
    "run the original module"
)


def read_within(program: Program) -> frozenset[int]:
    """Find the positions of outputs from which the program computes others with gradients."""
    outputs = [
        (position, output.variable)
        for position, output in enumerate(program.outputs)
        if output.kind in ("fresh", "view") and output.requires_grad
    ]
    if len(outputs) < 2:
        return frozenset()
    read: set[str] = set()  # variables from which outputs with gradients come
    needed = {program.storage[program.returned[p]] for p in program.tangents.values()}
    for op in reversed(program.order):
        call = program.calls.get(op)
        if call is None or op in program.backward_ops or op in program.alternatives:
            continue
        results = (name for name in call.results if name is not None)
        if any(program.storage[name] in needed and _is_real(program, name) for name in results):
            names = [n for n in call.reads if n in program.storage and not _detached(program, n)]
            read.update(names)
            needed.update(program.storage[name] for name in names)
    return frozenset(
        position
        for position, variable in outputs
        if any(_is_of(program, name, variable) for name in read)
    )


def _is_real(program: Program, name: str) -> bool:
    dtype = program.facts[name].dtype
    return dtype.is_floating_point or dtype.is_complex


def _detached(program: Program, name: str) -> bool:
    """Whether a variable is a view through `detach`."""
    while name in program.views:
        if program.views[name].target is aten.detach.default:
            return True
        name = program.views[name].reads[0]
    return False


def _is_of(program: Program, name: str, output: str) -> bool:
    """Whether a variable is a view of an output, or views all of the same memory."""
    if program.storage[name] != program.storage.get(output):
        return False
    sizes = [math.prod(program.facts[variable].shape) for variable in (name, output)]
    return sizes[0] == sizes[1] or program.view_chain(name, output) is not None


class _Backward:
    """Whether the backward over some outputs has begun, and which of them got a gradient."""

    def __init__(self) -> None:
        self.has_begun = False
        self.reached: set[int] = set()


class OutputHooks:
    """Sees hooks that are set on outputs: all on one tensor are in one dictionary."""

    def __init__(self) -> None:
        self._watched: list[tuple[int, Mapping[int, Any], weakref.ref[torch.Tensor]]] = []
        self._backward = _Backward()

    def watch(self, position: int, tensor: torch.Tensor) -> None:
        """See who will ask for the gradient of an output."""
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.grad_fn is not None:
                see = functools.partial(_see, self._backward, position)
                see.__torch_unserializable__ = True  # type: ignore[attr-defined]
                hooks: dict[int, Any] = OrderedDict(
                    {_OURS: see}
                )  # where those that are set later go, too
                tensor._backward_hooks = hooks
                tensor.grad_fn._register_hook_dict(tensor)
                self._watched.append((position, hooks, weakref.ref(tensor)))

    def begin(self, count: int) -> None:
        """See that the backward has begun, with so many gradients of outputs.

        The only one that comes is whole.

        Raises:
            BackwardError: if somebody asks for the whole gradient of an output that is watched.
        """
        self._backward.has_begun = True
        for position, hooks, ref in self._watched:
            if count == 1 and position in self._backward.reached:
                continue
            with torch._C.DisableTorchFunctionSubclass():
                tensor = ref()
                retains = tensor is not None and tensor.retains_grad
            if retains or not all(_only_waits(hook) for hook in hooks.values()):
                raise _refusal(position, "retain_grad" if retains else "a hook")
        self._watched = []


def _only_waits(hook: Any) -> bool:
    """Whether a hook is ours, or one of torch's own, which wait for a gradient and keep it."""
    function = getattr(hook, "func", hook)
    module = getattr(function, "__module__", None) or ""
    return module == __name__ or module.startswith("torch.distributed.")


def _see(backward: _Backward, position: int, gradient: torch.Tensor | None) -> None:
    """See at the end whether the gradient of an output went into the backward, or to the user."""

    def end() -> None:
        if not backward.has_begun:
            raise _refusal(position, "autograd.grad")

    if gradient is None:  # where that of another output is asked for
        return
    backward.reached.add(position)
    torch.autograd.Variable._execution_engine.queue_callback(end)


def _refusal(position: int, who: str) -> BackwardError:
    return BackwardError(
        f"{who} asks for the gradient of output {position} of the model, which the model reads "
        f"itself, too: with a plan that would be the part from outside alone; {_INSTEAD}"
    )
