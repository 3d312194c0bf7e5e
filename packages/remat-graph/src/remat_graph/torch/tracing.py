"""From a module or a region and its example inputs to a joint graph: flat tensors in and out.

A module's own `forward` runs under tracing, for plans that are not run. A buffer that it replaces
becomes an update in place; all else that it stores, and the random generators, are put back. Where
tensors hold no data, others stand in for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from remat_graph.torch._aot import Joint, StandIns, trace_joint
from remat_graph.torch.caches import caches_within, tensors_forgotten
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.process import generators_restored, process_lock
from remat_graph.torch.restoring import left_as_it_was
from remat_graph.torch.structure import FlatCall, Structure, flatten

__all__ = ["FlatRegion", "original_forward", "original_forwards", "trace", "trace_region"]


def trace(module: torch.nn.Module, call: FlatCall) -> tuple[Joint, Structure]:
    """Trace a call of `module.forward` and its backward pass; also give how it returns tensors.

    Raises:
        CaptureError: if the forward cannot be one static graph.
    """
    _refuse_lost_dropout(module)
    _refuse_old_norm(module)
    stand_ins = StandIns()
    flat = _FlatModule(module, call, stand_ins)
    with (
        process_lock,
        generators_restored(),
        original_forwards(module),
        _RnnInSteps(),
        left_as_it_was(module),
    ):
        inputs = [stand_ins.of(_as_leaf(tensor)) for tensor in call.tensors]
        joint = trace_joint(flat, inputs)
    if flat.output_structure is None:
        raise CaptureError("the forward pass was not run")
    return flat.name_inputs(joint), flat.output_structure


class FlatRegion(torch.nn.Module):
    """A function of a flat list of inputs, as a module whose inputs are distinct tensors alone."""

    def __init__(
        self, region: Callable[..., Any], inputs: Sequence[Any], tensors: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._region = region
        position = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._inputs = [position.get(id(item), item) for item in inputs]
        self._is_tensor = [isinstance(item, torch.Tensor) for item in inputs]
        _, self.output_structure = flatten(())

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Give the tensors that the function returns."""
        given = zip(self._inputs, self._is_tensor, strict=True)
        result = self._region(*(tensors[item] if known else item for item, known in given))
        leaves, self.output_structure = flatten(result)
        return leaves


def trace_region(region: FlatRegion, tensors: list[torch.Tensor]) -> Joint:
    """Trace a region and its backward pass.

    Raises:
        CaptureError: if it cannot be one static graph.
    """
    with process_lock, _RnnInSteps():
        return trace_joint(region, [_as_leaf(tensor) for tensor in tensors])


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Cut a tensor off from what made it: torch warns where it reads `.grad` of one that is not."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


class _FlatModule(torch.nn.Module):
    """`module` as a function from a flat list of tensors to a flat list of tensors.

    Tensors that are plain attributes of a module are lifted to inputs of the graph, as buffers are.
    """

    def __init__(self, module: torch.nn.Module, call: FlatCall, stand_ins: StandIns) -> None:
        super().__init__()
        self.module = module
        self._stand_ins = stand_ins
        self.training = module.training
        self._call = call
        self._caches = caches_within(module)
        self._lifted = [
            (f"{name}.{key}".removeprefix("."), owner, key)
            for name, owner in module.named_modules()
            for key, value in owner.__dict__.items()
            if isinstance(value, torch.Tensor)
        ]
        for index, (_, owner, key) in enumerate(self._lifted):
            self.register_buffer(f"lifted_{index}", _as_leaf(owner.__dict__[key]))
        self.output_structure: Structure | None = None

    def name_inputs(self, joint: Joint) -> Joint:
        """Name parameters, buffers and attributes as `module` does."""
        names = {f"lifted_{index}": name for index, (name, *_) in enumerate(self._lifted)}

        def named(kind: str, key: str | int) -> tuple[str, str | int]:
            if isinstance(key, str) and key in names:
                return "attribute", names[key]
            return kind, key.removeprefix("module.") if isinstance(key, str) else key

        inputs = {node: named(*role) for node, role in joint.inputs.items()}
        return dataclasses.replace(joint, inputs=inputs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Name each parameter once for each module that has it.

        A module that stands at two places is one module: swapping its parameters once for each
        place, as `remove_duplicate=False` has it, would leave the first swap in the user's model.
        """
        for name, owner in self.module.named_modules(prefix=f"{prefix}.module".lstrip(".")):
            for key, own in owner.named_parameters(name, recurse=False, remove_duplicate=False):
                yield key, cast("torch.nn.Parameter", self._stand_ins.of(own))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Name each buffer once for each module that has it."""
        for key, lifted in super().named_buffers(prefix, recurse=False, remove_duplicate=False):
            yield key, self._stand_ins.of(lifted)
        for name, owner in self.module.named_modules(prefix=f"{prefix}.module".lstrip(".")):
            for key, own in owner.named_buffers(name, recurse=False, remove_duplicate=False):
                yield key, self._stand_ins.of(own)

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = self._call.rebuild(tensors)
        # It is run several times, and is to do the same.
        with tensors_forgotten(self._caches), left_as_it_was(self.module):
            for index, (_, owner, key) in enumerate(self._lifted):
                owner.__dict__[key] = getattr(self, f"lifted_{index}")
            with _replaced_buffers_written_in_place(self.module):
                result = original_forward(self.module)(*args, **kwargs)
        leaves, self.output_structure = flatten(result)
        return leaves


def original_forward(module: torch.nn.Module) -> Any:
    """Find the forward that a module had before it was rematerialized."""
    forward = module.forward
    return getattr(forward, "original_forward", forward)


@contextmanager
def original_forwards(module: torch.nn.Module) -> Iterator[None]:
    """Let submodules that are rematerialized run as they were: one plan holds for all of it."""
    planned = [
        (part, part.__dict__["forward"])
        for part in module.modules()
        if hasattr(part.__dict__.get("forward"), "original_forward")
    ]
    for part, forward in planned:
        part.__dict__["forward"] = forward.original_forward
    try:
        yield
    finally:
        for part, forward in planned:
            part.__dict__["forward"] = forward


@contextmanager
def _replaced_buffers_written_in_place(module: torch.nn.Module) -> Iterator[None]:
    before = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    yield
    for owner, name, buffer in before:
        new = owner._buffers.get(name)
        if new is buffer:
            continue
        if not isinstance(new, torch.Tensor) or (new.shape, new.dtype) != (
            buffer.shape,
            buffer.dtype,
        ):
            raise CaptureError(
                f"forward replaces the buffer {name!r} of a {type(owner).__name__} by something "
                f"of another shape or type; keep its shape, and update it in place"
            )
        with torch.no_grad():
            buffer.copy_(new)
        owner._buffers[name] = buffer


def _refuse_lost_dropout(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if not (isinstance(part, torch.nn.RNNBase) and part.training):
            continue
        if part.dropout and part.num_layers > 1:
            raise CaptureError(
                f"{name or type(part).__name__} has dropout={part.dropout} between its layers, "
                f"which torch loses when it traces an RNN; stack RNNs of one layer each, with "
                f"nn.Dropout between them"
            )


def _refuse_old_norm(module: torch.nn.Module) -> None:
    """Refuse a weight that is made in a hook of the root, which is no part of its forward."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            norm = type(hook).__module__.rpartition(".")[2]
            raise CaptureError(
                f"{type(module).__name__} has torch.nn.utils.{norm}, which makes its weight in a "
                f"hook, before forward; use torch.nn.utils.parametrizations.{norm} instead"
            )


class _RnnInSteps(TorchFunctionMode):
    """Trace an LSTM on the CPU as the operators of its steps.

    oneDNN's fused layer keeps what its backward needs only where gradients are on, in a workspace
    of no declared type. The switch is of the process: others would compute other bits meanwhile, so
    it is off while an LSTM is traced and no longer.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, and an LSTM without oneDNN."""
        if getattr(func, "__name__", "") != "lstm":
            return func(*args, **(kwargs or {}))
        flags: Any = torch.backends.mkldnn
        before = flags.enabled
        flags.enabled = False
        try:
            return func(*args, **(kwargs or {}))
        finally:
            flags.enabled = before
