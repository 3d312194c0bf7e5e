"""The operator that CUDA has for an attention, where no CUDA device is there to choose it.

Torch chooses by the device that it runs on; these are its rules for NVIDIA's since Ampere, as of
torch 2.13 (ATen/native/transformers/cuda/sdp_utils.cpp), AMD's are taken to follow them. Flash
attention takes no mask and 16 bits; efficient attention takes masks and 32 bits, and as many heads
of keys as of queries; cuDNN's takes masks and grouped heads in 16 bits, and comes first on Hopper
and Blackwell of data centres. What none takes is a product, a softmax and a product, and keeps a
number, or with dropout three, for each pair of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["attention_on_cuda"]

aten = torch.ops.aten
_cuda: Any = torch.backends.cuda

_CUDNN_FIRST = {(9, 0), (10, 0), (10, 3)}
_FEW_REGISTERS = {(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)}  # no backward of some large heads
_HALF = (torch.float16, torch.bfloat16)


def attention_on_cuda(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by the operator that a device of this compute capability has for it."""
    tensors = (query, key, value)
    kernel = _choose(capability, tensors, attn_mask, dropout_p, is_causal, enable_gqa)
    mask = _as_bias(attn_mask, query.dtype)
    needs_sums = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    results: Any
    if kernel == "flash":
        width = query.shape[-1]
        padded = [functional.pad(tensor, (0, -width % 8)) if width % 8 else tensor
                  for tensor in tensors]  # fmt: skip
        own_scale = width**-0.5 if scale is None else scale
        results = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=own_scale
        )
        return results[0][..., :width] if width % 8 else results[0]  # type: ignore[no-any-return]
    if kernel == "cudnn":
        results = aten._scaled_dot_product_cudnn_attention(
            *tensors, mask, needs_sums, dropout_p, is_causal, False, scale=scale
        )
    elif kernel == "efficient":
        mask = None if mask is None else _aligned(mask, query, key)
        results = aten._scaled_dot_product_efficient_attention(
            *tensors, mask, needs_sums, dropout_p, is_causal, scale=scale
        )
    else:
        results = aten._scaled_dot_product_attention_math(
            *tensors, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    return results[0]  # type: ignore[no-any-return]


def _choose(
    capability: tuple[int, int],
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    grouped: bool,
) -> str:
    query, key, _ = tensors
    widths = {tensor.shape[-1] for tensor in tensors}
    heads = [tensor.shape[-3] for tensor in tensors if tensor.dim() == 4]
    dense = (
        len(heads) == 3
        and len({tensor.shape[0] for tensor in tensors}) == 1
        and 0 not in (query.shape[-2], key.shape[-2])
        and len({tensor.dtype for tensor in tensors}) == 1
        and all(tensor.stride(-1) == 1 for tensor in (*tensors, *([] if mask is None else [mask])))
    )
    if not dense:
        return "math"
    same_heads = len(set(heads)) == 1
    paired = same_heads or (grouped and heads[1] == heads[2] and heads[0] % heads[1] == 0)
    half = query.dtype in _HALF
    widest = max(widths)
    lacks_backward = (
        capability in _FEW_REGISTERS and any(tensor.requires_grad for tensor in tensors)
        and widest > 192 and (dropout > 0 or widest <= 224)
    )  # fmt: skip
    flash = (
        _cuda.flash_sdp_enabled() and mask is None and half and paired
        and len(widths) == 1 and widest <= 256 and not lacks_backward
        and not (is_causal and query.shape[-2] != key.shape[-2])
    )  # fmt: skip
    cudnn = (
        _cuda.cudnn_sdp_enabled() and capability in _CUDNN_FIRST and half
        and all(one % many == 0 for one in heads[:1] for many in heads[1:])
        and (grouped or same_heads) and widest <= 128 and all(w % 8 == 0 for w in widths)
        and dropout * 16 % 1 == 0 and _is_read_by_cudnn(mask, query, key)
        and key.shape[-2] != 1 and not (dropout and query.shape[-2] == 1)
        and not torch.are_deterministic_algorithms_enabled()
    )  # fmt: skip
    alignment = 8 if half else 4
    efficient = (
        _cuda.mem_efficient_sdp_enabled() and (half or query.dtype is torch.float32)
        and same_heads and query.shape[-1] == key.shape[-1]
        and all(width % alignment == 0 for width in widths)
    )  # fmt: skip
    ways = (("cudnn", cudnn), ("flash", flash), ("efficient", efficient))
    return next((name for name, fits in ways if fits), "math")


def _is_read_by_cudnn(mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
    if mask is None:
        return True
    whole = (*query.shape[:2], query.shape[-2], key.shape[-2])
    fits = all(size in (1, most) for size, most in zip(mask.shape[::-1], whole[::-1], strict=False))
    return fits and mask.dim() in (2, 4) and not mask.requires_grad


def _as_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Give what is added to the products, of a mask that may say with bits which count."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)


def _aligned(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Lay a mask out as efficient attention reads it: rows that begin at multiples of 8."""
    if any(step % 8 for step in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = functional.pad(mask, (0, 8 - length % 8))[..., :length]
    return mask.expand(*query.shape[:2], query.shape[-2], key.shape[-2])
