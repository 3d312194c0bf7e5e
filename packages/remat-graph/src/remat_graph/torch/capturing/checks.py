"""What is asked of a module and its example call before they are traced."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from remat_graph.torch.errors import CaptureError
from remat_graph.torch.tracing.fakes import has_no_data
from remat_graph.torch.tracing.joint import Joint, Key
from remat_graph.torch.tracing.rnns import draws_otherwise, other_draws
from remat_graph.torch.tracing.structure import FlatCall

__all__ = [
    "check_changed",
    "check_devices",
    "check_differentiable",
    "check_measurable",
    "check_shapes",
    "check_traceable",
    "is_dry",
    "is_on_cuda",
]


def is_dry(module: torch.nn.Module, call: FlatCall) -> bool:
    """Whether any tensor holds no data, so that what is captured cannot be run."""
    return any(map(has_no_data, (*module.parameters(), *module.buffers(), *call.tensors)))


def is_on_cuda(module: torch.nn.Module, call: FlatCall) -> bool:
    """Whether any tensor is on a CUDA device."""
    return any(t.is_cuda for t in (*module.parameters(), *module.buffers(), *call.tensors))


def check_differentiable(module: torch.nn.Module, call: FlatCall) -> None:
    """Look for something to train.

    Raises:
        CaptureError: if there is nothing.
    """
    if not any(t.requires_grad for t in (*module.parameters(), *call.tensors)):
        raise CaptureError(
            "no parameter of the module requires a gradient, and no input does; "
            "call requires_grad_() on what is to be trained"
        )


def check_shapes(module: torch.nn.Module) -> None:
    """Look for lazy modules that wait for their first call.

    Raises:
        CaptureError: if there is one.
    """
    for name, part in module.named_modules():
        if any(map(is_lazy, (*part._parameters.values(), *part._buffers.values()))):
            raise CaptureError(
                f"{name or 'the module'}, a {type(part).__name__}, has no shapes before its first "
                f"call; call the model once"
            )


def check_devices(module: torch.nn.Module, call: FlatCall) -> None:
    """Compare where the module and its inputs are.

    Raises:
        CaptureError: if an input is elsewhere, where what is on meta counts as on the CPU; or if
            fake tensors are on a device that is not there: torch differentiates none of those.
    """
    own = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    traced = {_traced_on(device) for device in own}
    for position, tensor in enumerate(call.tensors):
        if tensor.ndim > 0 and own and _traced_on(tensor.device) not in traced:
            raise CaptureError(
                f"example input {position} is on {tensor.device}, the module on "
                f"{', '.join(sorted(map(str, own)))}; move one to the other with .to()"
            )
    for tensor in (*module.parameters(), *module.buffers(), *call.tensors):
        if has_no_data(tensor) and not _is_there(tensor.device):
            raise CaptureError(
                f"a fake tensor is on {tensor.device}, and this machine or this build of torch has "
                f"no {tensor.device.type} device, without which torch cannot differentiate it; "
                f"make the model on meta, which is planned as on the CPU"
            )


def _is_there(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    return bool(torch.get_device_module(device).is_available())


def _traced_on(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def check_changed(joint: Joint, tensors: list[torch.Tensor], leaves: frozenset[Key]) -> None:
    """Look for inputs that the forward changes in place, and whose gradients would be others then.

    The tensors may stand for others, so what is a leaf is said beside.

    Raises:
        CaptureError: if there is one. A leaf is none: torch lets it be changed behind autograd's
            back alone.
    """
    for kind, key in joint.changed:
        if kind == "input" and tensors[int(key)].requires_grad and (kind, key) not in leaves:
            raise CaptureError(
                f"input {key} is changed in place and requires a gradient; clone it first"
            )


def check_measurable(module: torch.nn.Module, call: FlatCall) -> None:
    """Look for tensors without data, of which nothing can be measured.

    Raises:
        CaptureError: if there is one.
    """
    if is_dry(module, call):
        raise CaptureError(
            "nothing can be measured on the meta device, or of fake tensors; give costs='estimate' "
            "or a DeviceSpec, or move the module and its example inputs to a device that computes"
        )


def check_traceable(module: torch.nn.Module, *, on_cuda: bool = False) -> None:
    """Look for what torch would trace as something else.

    Raises:
        CaptureError: if there is dropout between the layers of an RNN that is on CUDA, or planned
            for it; an old norm of a weight on the module itself; or a part that `torch.jit` made.
    """
    _refuse_other_draws(module, on_cuda)
    _refuse_old_norm(module)
    _refuse_scripted(module)


def _refuse_other_draws(module: torch.nn.Module, on_cuda: bool) -> None:
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.RNNBase) and draws_otherwise(part, on_cuda=on_cuda):
            raise other_draws(name or type(part).__name__, part.dropout)


def _refuse_old_norm(module: torch.nn.Module) -> None:
    """Refuse a weight that is made in a hook of the root, which is no part of its forward."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            norm = type(hook).__module__.rpartition(".")[2]
            raise CaptureError(
                f"{type(module).__name__} has torch.nn.utils.{norm}, which makes its weight in a "
                f"hook, before forward; use torch.nn.utils.parametrizations.{norm} instead"
            )


def _refuse_scripted(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the model'} was made by torch.jit, and the modules of a graph are "
                f"Python's; put the module there that it was made of. As a part of a model it "
                f"runs as it is in remat.rematerialize, between regions"
            )
