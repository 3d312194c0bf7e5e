"""A training graph as it is on a CUDA device, traced without one.

Torch differentiates no fake tensors of a device that is not there. So the forward is traced on the
host, with the operators that CUDA would have in place of the CPU's, and the joint graph is taken to
be on the device (`move_to_cuda`): buffers are in blocks of its allocator, states of generators and
seeds where they would be. Autocast on CUDA is one on the CPU meanwhile, with CUDA's lists of what
stays in 32 bits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from remat_graph.torch.tracing.attention_kernels import attention_on_cuda

__all__ = ["as_on_cuda"]

_CAST = (torch.float32, torch.bfloat16, torch.float16)
# Of ATen/autocast_mode.h what CUDA computes in 32 bits and the CPU does not.
_IN_32_BITS = frozenset(
    {
        "acos", "asin", "cosh", "cosine_similarity", "cumprod", "cumsum", "erfinv", "exp", "expm1",
        "group_norm", "kl_div", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax",
        "logsumexp", "norm", "pow", "__pow__", "prod", "reciprocal", "__rpow__", "rsqrt", "sinh",
        "smooth_l1_loss", "softmax", "softplus", "sum", "tan",
    }
)  # fmt: skip


class CudaOperators(TorchFunctionMode):
    """Runs what CUDA has other operators for by these; `capability` is that of the device."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()
        self._capability = capability

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function, and what it is made of, as on CUDA."""
        named = kwargs or {}
        if torch.is_autocast_enabled("cpu"):
            args, named = _cast_as_on_cuda(getattr(func, "__name__", ""), args, named)
        if func is functional.scaled_dot_product_attention:
            return attention_on_cuda(self._capability, *args, **named)
        if isinstance(func, FunctionType) and _is_guarded(func):
            with self:
                return _open(func)(*args, **named)
        return func(*args, **named)


def _cast_as_on_cuda(name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Cast what CUDA's autocast casts and the CPU's does not, or a mode sees before it does."""
    if name == functional.scaled_dot_product_attention.__name__:
        dtype = torch.get_autocast_dtype("cpu")
    elif name in _IN_32_BITS:
        dtype = torch.float32
    else:
        return args, kwargs

    def cast(item: torch.Tensor) -> torch.Tensor:
        return item.to(dtype) if item.dtype in _CAST else item

    arguments: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, cast, (args, dict(kwargs)))
    return arguments


@contextmanager
def as_on_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Run on the host as on a CUDA device: by its operators, and under its autocast."""
    thread, original = threading.get_ident(), torch.autocast.__init__

    def make(self: Any, device_type: str, dtype: Any = None, *rest: Any, **named: Any) -> None:
        if device_type == "cuda" and threading.get_ident() == thread:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *rest, **named)

    torch.autocast.__init__ = make  # type: ignore[method-assign]
    try:
        with CudaOperators(capability):
            yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


def _is_guarded(func: FunctionType) -> bool:
    """Whether it is of torch.nn.functional, and asks for modes before it does anything."""
    return func.__module__ == functional.__name__ and bool(_guards(func))


def _guards(func: FunctionType) -> list[str]:
    return [name for name in func.__code__.co_names if name.startswith("has_torch_function")]


@functools.cache
def _open(func: FunctionType) -> Callable[..., Any]:
    """Give a function of torch that does not hand itself over to a mode first."""
    own = dict.fromkeys(_guards(func), _never)
    opened = FunctionType(
        func.__code__, {**func.__globals__, **own}, func.__name__, func.__defaults__,
        func.__closure__,
    )  # fmt: skip
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


def _never(*_: Any) -> bool:
    return False
