"""Rules of norms and attention: batches, heads and rows are cut, what they normalise is not.

Gradients of weights and biases are summed. Batch norm is cut along the batch where it takes its
statistics from outside.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from remat_graph.torch.slices.placement import (
    SUMMED,
    WHOLE,
    Place,
    Placement,
    Reading,
    Size,
    Sliced,
)

__all__ = ["RULES"]

aten = torch.ops.aten


def _rows(c: Reading) -> Iterator[int]:
    """List the axes in front of those that are normalised."""
    shape = c.shape("input")
    for axis in range(len(shape) - len(c["normalized_shape"])):
        if shape[axis] > 1:
            yield axis


def _layer_norm(c: Reading) -> Iterator[Placement]:
    for axis in _rows(c):
        yield c.placement({"input": axis}, [axis] * len(c.call.results))


def _layer_norm_backward(c: Reading) -> Iterator[Placement]:
    """Cut outermost axes alone: kernels take mean and deviation to be contiguous, unasked."""
    sliced = {"grad_out", "input", "mean", "rstd"}.intersection(c.call.argument_names)
    rows = list(_rows(c))
    for axis in rows:
        places = dict.fromkeys(sliced, Sliced(axis, axis - rows[0]))
        yield c.placement(places, [places["input"]] + [SUMMED] * (len(c.call.results) - 1))


def _group_norm(c: Reading) -> Iterator[Placement]:
    if c["N"] > 1:
        yield c.placement({"input": 0}, [0, 0, 0], sizes=[Size("N")])


def _group_norm_backward(c: Reading) -> Iterator[Placement]:
    if c["N"] > 1:
        places = dict.fromkeys(("grad_out", "input", "mean", "rstd"), 0)
        yield c.placement(places, [0, SUMMED, SUMMED], sizes=[Size("N")])


def _batch_norm(c: Reading) -> Iterator[Placement]:
    training = c.call.target is aten.native_batch_norm.default and c["training"]
    if not training and c.shape("input")[0] > 1:
        yield c.placement({"input": 0}, [0])


def _batch_norm_backward(c: Reading) -> Iterator[Placement]:
    if not c["train"] and c.shape("input")[0] > 1:
        yield c.placement({"grad_out": 0, "input": 0}, [0, SUMMED, SUMMED])


_MASKS = ("attn_mask", "attn_bias")
_PER_ROW = ("grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp")
_BATCH, _HEADS = 0, 1


def _attention(c: Reading) -> Iterator[Placement]:
    """Cut batches and heads. What is dropped is drawn in the order of the whole: it is not cut."""
    yield from _attending(c, ["query", "key", "value"], count=2)


def _attention_backward(c: Reading) -> Iterator[Placement]:
    mask = c.call.target is aten._scaled_dot_product_efficient_attention_backward.default
    if not (mask and c["grad_input_mask"][3]):
        yield from _attending(c, [n for n in _PER_ROW if n in c.call.argument_names], count=3)


def _attending(c: Reading, sliced: list[str], count: int) -> Iterator[Placement]:
    """Cut heads on CUDA where there is one batch: kernels take sums to be contiguous, unasked."""
    on_cpu = "for_cpu" in c.call.name
    for axis in (_BATCH, _HEADS) if on_cpu or c.shape("query")[_BATCH] == 1 else (_BATCH,):
        places: dict[str, int | Place] = dict.fromkeys(sliced, axis)
        for name in _MASKS:
            mask = c.facts(name) if name in c.call.argument_names else None
            if mask is not None:
                own = axis - 4 + len(mask.shape)
                places[name] = own if own >= 0 and mask.shape[own] > 1 else WHOLE
        heads = {c.shape(name)[axis] for name in ("query", "key", "value")}
        if not c["dropout_p"] and len(heads) == 1 and heads != {1}:
            yield c.placement(places, [axis] * count)


RULES = {
    **dict.fromkeys((aten.native_layer_norm.default, aten._fused_rms_norm.default), _layer_norm),
    **dict.fromkeys(
        (aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default),
        _layer_norm_backward,
    ),
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    **dict.fromkeys(
        (aten.native_batch_norm.default, aten._native_batch_norm_legit_no_training.default),
        _batch_norm,
    ),
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    **dict.fromkeys(
        (
            aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            aten._scaled_dot_product_cudnn_attention_backward.default,
            aten._scaled_dot_product_efficient_attention_backward.default,
            aten._scaled_dot_product_flash_attention_backward.default,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        ),
        _attention_backward,
    ),
}
