"""A `TorchDispatchMode` of the user's around a call, beneath which TorchDynamo compiles nothing."""

from __future__ import annotations

import warnings

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from remat.errors import BudgetWarning

__all__ = ["is_beneath_a_mode"]


def is_beneath_a_mode() -> bool:
    """Whether a call is to run as it is, for a mode that sees each operator.

    Warns:
        BudgetWarning: if it is.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    names = [
        type(mode).__name__
        for mode in _get_current_dispatch_mode_stack()
        if not (mode.is_infra_mode() or mode.ignore_compile_internals())
    ]
    if names:
        warnings.warn(
            f"{names[-1]} is on, a TorchDispatchMode, and TorchDynamo compiles nothing beneath one:"
            f" the forward runs as it is, beside the budget. Its gradients are right, and forwards "
            f"without the mode run by the plan",
            BudgetWarning,
            stacklevel=3,
        )
    return bool(names)
