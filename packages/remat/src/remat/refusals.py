"""What a rematerialized model cannot do, said early, with what to write instead."""

from __future__ import annotations

import functools
import pickle
import sys
import types
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad

from remat.errors import RematError

__all__ = [
    "refuse_checkpointed",
    "refuse_scripted",
    "refuse_transforms",
    "refuse_unpicklable",
    "refuse_wrapped",
]

_DDP = "torch.nn.parallel.distributed"
_FSDP = "torch.distributed.fsdp"
_CHECKPOINT = torch.utils.checkpoint.__file__


def refuse_wrapped(model: torch.nn.Module) -> None:
    """Refuse what sends gradients or weights between processes around the forward.

    Raises:
        RematError: if the model is wrapped by DDP, or if it or a part of it is sharded by FSDP.
    """
    if any(cls.__module__ == _DDP for cls in type(model).__mro__):
        raise RematError(
            "the model is wrapped by DistributedDataParallel already; write "
            "DistributedDataParallel(remat.rematerialize(model, ...)) instead"
        )
    for part in model.modules():
        if any(cls.__module__.startswith(_FSDP) for cls in type(part).__mro__):
            raise RematError(
                "the model is sharded by FSDP already; write "
                'remat.rematerialize(model, ..., regions="layers.*") first, with the names of the '
                "blocks that you shard, and then fully_shard these blocks and the result"
            )


def refuse_scripted(model: torch.nn.Module) -> None:
    """Refuse a model whose forward is no code of Python's.

    Raises:
        RematError: if `torch.jit` made it.
    """
    if isinstance(model, torch.jit.ScriptModule):
        name = getattr(model, "original_name", type(model).__name__)
        raise RematError(
            f"{name} was made by torch.jit, and TorchDynamo makes graphs of Python's code alone; "
            f"give the module that it was made of, as it was before torch.jit.script or trace"
        )


def refuse_transforms() -> None:
    """Refuse a call within a transform of `torch.func`, or in forward mode.

    Raises:
        RematError: if there is one around the call.
    """
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        raise RematError(
            "transforms of torch.func, and derivatives in forward mode, do not go through a plan; "
            "use the original model in them, which has the same parameters"
        )


def refuse_checkpointed(name: str, frame: types.FrameType | None = None) -> None:
    """Refuse to run something by a plan within a checkpoint: it would run again in the backward.

    `frame` is where it is called, if that is not the caller's.

    Raises:
        RematError: if `torch.utils.checkpoint` calls it.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "checkpoint" and frame.f_code.co_filename == _CHECKPOINT:
            raise RematError(
                f"{name} runs by a plan, and is called by torch.utils.checkpoint, "
                f"which would run all of it again in the backward; call it directly: the plan says "
                f"what is computed again"
            )
        frame = frame.f_back


def refuse_unpicklable(loss: Any, optimizer: Any) -> None:
    """Refuse to pickle a loss, or what makes an optimizer, that pickle could not find again.

    Raises:
        RematError: if it is a lambda, or a function within another one, or holds one.
    """
    makes = optimizer if isinstance(optimizer, (types.FunctionType, functools.partial)) else None
    for name, item in (("loss", loss), ("optimizer", makes)):
        try:
            pickle.dumps(item)
        except (pickle.PicklingError, AttributeError) as error:
            raise RematError(
                f"{name}= cannot be pickled with the model ({error}); give a function that is "
                f"defined by def at the top of a module, or save model.state_dict() instead"
            ) from None
