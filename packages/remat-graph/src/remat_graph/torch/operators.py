"""What is known of operators beyond their schemas: one record for each that has any.

A rule that asks about an operator reads it here; to teach the project an operator, fill in its
record. `operator_of(target)` gives an empty one for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch

from remat_graph.torch.calls import Call, TensorFacts
from remat_graph.torch.kernels import attention, batch_norm, embedding
from remat_graph.torch.kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_over,
    workspace_bytes,
)
from remat_graph.torch.kernels.lstm import lstm_layer, lstm_layer_backward
from remat_graph.torch.kernels.masked_writes import (
    gradient_of_values,
    of_whole_masks,
    put_of_whole_masks,
)
from remat_graph.torch.kernels.matrices import with_pivots, with_regular_matrix
from remat_graph.torch.kernels.packing import (
    backward_of_kept,
    backward_of_pool,
    keep_in_place,
    pack_above,
    pack_mask,
    pack_offsets,
    pack_within,
    unpack_mask,
)
from remat_graph.torch.kernels.unit_tangent import scaled, scaled_in_place, total_weight
from remat_graph.torch.slices.elementwise import is_pointwise, pointwise
from remat_graph.torch.slices.joining import with_joined
from remat_graph.torch.slices.placement import Placement, Reading, Rule
from remat_graph.torch.slices.rules import RULES

__all__ = ["OPERATORS", "Operator", "operator_of", "placements"]

aten = torch.ops.aten

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Operator:
    """What is known of one overload, or of a function that a program calls.

    - `in_place` makes the same bits in the buffer of its first argument, and takes nothing beside.
    - `part`: it assigns to a part of a tensor, and this view gives that part. `assigns` also holds
      for assignments that no view writes.
    - `runs_as` is what runs in its place, which asks torch what eager would take.
    - `decides`: it draws a decision from numbers, which must stay decided: it runs once.
    - `deterministic`: a function without a body that gives the same each time it is run.
    - `channels_last`: its result is the same function of images in either layout. All its arguments
      of four dimensions are images but the one at `weight`.
    - `plain_view`: a view that differs from what it is of in shape, strides and offset alone.
    - `is_product`: a matrix product, which autocast runs in 16 bits.
    - `sizes_alone`: it reads no more than the sizes of its second argument; `into` then writes its
      result into a given buffer, where it is the backward of a max-pooling.
    - `by_signs`: the backward of an activation, which looks at the signs of its second argument, or
      at which of its elements lie within limits, alone. `packs` packs these; `None` if nothing may.
    - `statistics_like`: where its weight is, in whose type the CPU keeps mean and deviation.
    - `sum_in_terms`: a loss whose result, though one number, takes the memory of all its terms.
    - `in_slices` lists the ways in which a call of it can be run slice by slice.
    - `adds_to` adds its result to a tensor, without a buffer for what it adds.
    - `workspace` gives the bytes that a call takes beside what it reads and gives, of what is known
      of its arguments, of the first of which slices have fewer rows, and of the call.
    - `made_up` gives, for arguments that were made up to measure it, those with which it runs, and
      takes the most memory.
    - `flops_like`: the operator by whose formula, which torch has, its operations are counted.
    - `fuses`: a compiler makes loops of it and joins them with those of its neighbours, as of all
      that is pointwise.
    """

    in_place: Function | None = None
    part: Function | None = None
    assigns: bool = False
    runs_as: Function | None = None
    decides: bool = False
    deterministic: bool = False
    channels_last: bool = False
    weight: int | None = None
    plain_view: bool = False
    is_product: bool = False
    sizes_alone: bool = False
    into: Function | None = None
    by_signs: bool = False
    packs: Function | None = None
    statistics_like: int | None = None
    sum_in_terms: bool = False
    in_slices: Rule | None = None
    adds_to: Function | None = None
    workspace: Callable[[Mapping[str, TensorFacts], Call], int] | None = None
    made_up: Function | None = None
    flops_like: Function | None = None
    fuses: bool = False

    @property
    def may_overwrite(self) -> bool:
        """Whether it can write its result over what it reads."""
        return self.in_place is not None or self.part is not None


def operator_of(target: Any) -> Operator:
    """Give what is known of what a call runs."""
    return OPERATORS.get(target, _NOTHING)


_NOTHING = Operator()


def placements(call: Call, facts: Mapping[str, TensorFacts]) -> tuple[Placement, ...]:
    """List the ways in which a call can be run slice by slice; none of an operator without a rule.

    Without one of its own, what torch tags as pointwise is cut along any axis. What draws is not.
    """
    rule = operator_of(call.target).in_slices
    if rule is None and is_pointwise(call.target):
        rule = pointwise
    if rule is None or call.random is not None or not all(name in facts for name in call.reads):
        return ()
    listed = dict.fromkeys(rule(Reading(call, facts)))
    ways = (each for each in listed if not each.is_sliced or each.units(call, facts) > 1)
    return with_joined(call, tuple(ways), facts)


def _over_gradient(operator: Any) -> Function:
    """Let the backward of a pointwise function write over the gradient that it reads.

    It is for operators whose kernel writes into `grad_input` itself, and so needs nothing beside.
    """

    def over_gradient(grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = operator.grad_input(grad, *args, **kwargs, grad_input=grad)
        return result

    over_gradient.__name__ = f"{operator.__name__}_"
    return over_gradient


def _of_rows(facts: Mapping[str, TensorFacts], call: Call) -> int:
    return workspace_bytes(facts[call.reads[0]], *call.args[-2:])


_DECISIONS = (
    aten._unique2, aten.argmax, aten.argmin, aten.argsort, aten.bincount, aten.bucketize,
    aten.cummax, aten.cummin, aten.histc, aten.kthvalue, aten.max.dim, aten.median.dim,
    aten.min.dim, aten.mode, aten.msort, aten.multinomial, aten.nanmedian.dim, aten.nonzero,
    aten.nonzero_static, aten.searchsorted, aten.sort, aten.topk, aten.unique_consecutive,
    aten.unique_dim,
)  # fmt: skip


# Beside what is pointwise: reductions, norms, losses, copies into another shape. Not what looks up
# rows by their numbers: of -1 compiled code gives the last one, where eager raises. Not
# `hardsigmoid_backward`: torch takes it apart with a sixth in 32 bits, for doubles, too.
_FUSING = (
    aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default,
    aten._log_softmax.default, aten._log_softmax_backward_data.default,
    aten._softmax.default, aten._softmax_backward_data.default, aten._to_copy.default,
    aten.all, aten.amax.default, aten.amin.default, aten.any, aten.arange, aten.cat.default,
    aten.clone.default, aten.constant_pad_nd.default, aten.elu_backward.default,
    aten.full.default, aten.full_like.default,
    aten.gelu_backward.default,
    aten.hardswish_backward.default, aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default, aten.linalg_vector_norm.default,
    aten.log_sigmoid_backward.default, aten.masked_fill.Tensor, aten.mean,
    aten.mse_loss.default, aten.mse_loss_backward.default,
    aten.native_batch_norm_backward.default,
    aten.native_group_norm.default, aten.native_group_norm_backward.default,
    aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
    aten.new_full.default, aten.new_ones.default, aten.new_zeros.default,
    aten.ones.default,
    aten.ones_like.default, aten.scalar_tensor.default, aten.select_backward.default,
    aten.select_scatter.default, aten.slice_backward.default, aten.slice_scatter.default,
    aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default,
    aten.softplus_backward.default, aten.stack.default, aten.sum, aten.tril.default,
    aten.triu.default, aten.var.correction, aten.var_mean.correction,
    aten.where.ScalarOther, aten.where.ScalarSelf, aten.zeros.default, aten.zeros_like.default,
)  # fmt: skip


def _overloads(operators: tuple[Any, ...]) -> list[Any]:
    """List overloads, and all of operators that are named as a whole."""
    return [
        overload
        for each in operators
        for overload in (
            [each]
            if isinstance(each, torch._ops.OpOverload)
            else [getattr(each, name) for name in each.overloads()]
        )
    ]


OPERATORS: dict[Any, Operator] = {
    # pointwise
    aten.relu.default: Operator(in_place=aten.relu_.default, channels_last=True),
    aten.hardtanh.default: Operator(in_place=aten.hardtanh_.default, channels_last=True),
    aten.leaky_relu.default: Operator(in_place=aten.leaky_relu_.default, channels_last=True),
    aten.sigmoid.default: Operator(in_place=aten.sigmoid_.default, channels_last=True),
    aten.tanh.default: Operator(in_place=aten.tanh_.default),
    aten.silu.default: Operator(channels_last=True),
    aten.gelu.default: Operator(channels_last=True),
    aten.neg.default: Operator(in_place=aten.neg_.default),
    aten.add.Tensor: Operator(in_place=aten.add_.Tensor, channels_last=True),
    aten.sub.Tensor: Operator(in_place=aten.sub_.Tensor, channels_last=True),
    aten.mul.Tensor: Operator(in_place=aten.mul_.Tensor, channels_last=True),
    aten.div.Tensor: Operator(in_place=aten.div_.Tensor),
    # `mul_.Scalar` rounds the number to 16 bits
    aten.mul.Scalar: Operator(in_place=aten.mul_.Tensor),
    aten.div.Scalar: Operator(in_place=aten.div_.Scalar),
    # what writes some elements, as backwards do into zeros
    **{
        getattr(packet, name): Operator(
            in_place=getattr(getattr(aten, f"{packet.__name__}_"), name)
        )
        for packet, names in (
            (aten.index_add, ("default",)),
            (aten.index_copy, ("default",)),
            (aten.masked_fill, ("Scalar", "Tensor")),
            (aten.masked_scatter, ("default",)),
            (aten.put, ("default",)),
            (aten.scatter, ("src", "value")),
            (aten.scatter_add, ("default",)),
        )
        for name in names
    },
    **dict.fromkeys(
        (aten.index_put.default, aten._unsafe_index_put.default),
        Operator(in_place=aten.index_put_.default, made_up=put_of_whole_masks),
    ),
    gradient_of_values: Operator(deterministic=True, made_up=of_whole_masks),
    embedding.add_embedding_gradient: Operator(
        in_place=embedding.add_embedding_gradient_over,
        deterministic=True,
        workspace=embedding.workspace_of_rows,
    ),
    # backwards of pointwise functions
    **{
        operator.default: Operator(in_place=_over_gradient(operator))
        for operator in (
            aten.elu_backward,
            aten.hardshrink_backward,
            aten.hardsigmoid_backward,
            aten.sigmoid_backward,
            aten.softplus_backward,
            aten.softshrink_backward,
            aten.tanh_backward,
        )
    },
    **{
        operator.default: Operator(in_place=_over_gradient(operator), channels_last=True)
        for operator in (aten.gelu_backward, aten.silu_backward)
    },
    **{
        operator.default: Operator(
            in_place=_over_gradient(operator), channels_last=True, by_signs=True, packs=packs
        )
        for operator, packs in (
            (aten.threshold_backward, pack_above),
            (aten.hardtanh_backward, pack_within),
            (aten.leaky_relu_backward, None),
        )
    },
    # operators and functions of ours, and of Python's
    **dict.fromkeys((lstm_layer, lstm_layer_backward), Operator(deterministic=True)),
    backward_of_kept: Operator(in_place=keep_in_place, deterministic=True),
    cross_entropy: Operator(deterministic=True, workspace=_of_rows),
    cross_entropy_backward: Operator(
        in_place=cross_entropy_over, deterministic=True, workspace=_of_rows
    ),
    scaled: Operator(in_place=scaled_in_place, deterministic=True),
    **dict.fromkeys(
        (
            backward_of_pool,
            pack_above,
            pack_mask,
            pack_offsets,
            pack_within,
            batch_norm.running_statistics,
            getitem,
            total_weight,
            unpack_mask,
        ),
        Operator(deterministic=True),
    ),
    # attention: on the CPU it takes its arguments in the order of the one that has a formula
    aten._scaled_dot_product_flash_attention_for_cpu.default: Operator(
        runs_as=attention.attention, flops_like=aten._scaled_dot_product_flash_attention
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: Operator(
        runs_as=attention.attention_backward,
        flops_like=aten._scaled_dot_product_flash_attention_backward,
    ),
    # products and convolutions
    aten.mm.default: Operator(is_product=True, adds_to=torch.Tensor.addmm_),
    aten.bmm.default: Operator(is_product=True, adds_to=torch.Tensor.baddbmm_),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), Operator(is_product=True)),
    aten.convolution.default: Operator(channels_last=True, weight=1),
    aten.convolution_backward.default: Operator(channels_last=True, weight=2),
    # factorisations
    **dict.fromkeys(
        (
            aten.linalg_inv_ex.default,
            aten._linalg_solve_ex.default,
            aten.linalg_cholesky_ex.default,
            aten.linalg_ldl_factor_ex.default,
            aten.linalg_lu_factor_ex.default,
        ),
        Operator(made_up=with_regular_matrix),
    ),
    **dict.fromkeys(
        (aten.linalg_lu_solve.default, aten.lu_unpack.default), Operator(made_up=with_pivots)
    ),
    # norms
    aten._native_batch_norm_legit_functional.default: Operator(
        runs_as=batch_norm.batch_norm, channels_last=True, statistics_like=1
    ),
    aten._native_batch_norm_legit.no_stats: Operator(runs_as=batch_norm.batch_norm_again),
    aten.native_batch_norm.default: Operator(channels_last=True),
    aten.native_batch_norm_backward.default: Operator(
        runs_as=batch_norm.batch_norm_backward, channels_last=True
    ),
    aten.native_layer_norm.default: Operator(statistics_like=2),
    aten.native_group_norm.default: Operator(statistics_like=1),
    # pooling and images
    aten.max_pool2d_with_indices.default: Operator(channels_last=True),
    aten.max_pool2d_with_indices_backward.default: Operator(
        channels_last=True,
        sizes_alone=True,
        into=aten.max_pool2d_with_indices_backward.grad_input,
    ),
    aten.max_pool3d_with_indices_backward.default: Operator(
        sizes_alone=True, into=aten.max_pool3d_with_indices_backward.grad_input
    ),
    aten.avg_pool2d.default: Operator(channels_last=True),
    aten.avg_pool2d_backward.default: Operator(channels_last=True, sizes_alone=True),
    **dict.fromkeys(
        (
            aten.avg_pool3d_backward.default,
            aten._adaptive_avg_pool2d_backward.default,
            aten._adaptive_avg_pool3d_backward.default,
        ),
        Operator(sizes_alone=True),
    ),
    aten.upsample_nearest2d.default: Operator(channels_last=True),
    aten.upsample_bilinear2d.default: Operator(channels_last=True),
    aten.cat.default: Operator(channels_last=True),
    # views, and assignments to parts of tensors as functionalisation writes them
    **dict.fromkeys(
        (
            aten.expand.default,
            aten.permute.default,
            aten.select.int,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.t.default,
            aten.transpose.int,
            aten.unsqueeze.default,
            aten.view.default,
        ),
        Operator(plain_view=True),
    ),
    **dict.fromkeys(
        (aten.alias.default, aten.detach.default, aten.slice.Tensor),
        Operator(plain_view=True, channels_last=True),
    ),
    aten.slice_scatter.default: Operator(part=aten.slice.Tensor, assigns=True),
    aten.select_scatter.default: Operator(part=aten.select.int, assigns=True),
    aten.diagonal_scatter.default: Operator(part=aten.diagonal.default, assigns=True),
    aten.as_strided_scatter.default: Operator(assigns=True),
    # losses that resize the tensor of their terms to hold the sum (ATen/native/Loss.cpp)
    **dict.fromkeys(
        (
            aten.binary_cross_entropy.default,
            aten.mse_loss.default,
            aten.smooth_l1_loss.default,
            aten.soft_margin_loss.default,
        ),
        Operator(sum_in_terms=True),
    ),
}
for _decision in _overloads(_DECISIONS):
    OPERATORS[_decision] = replace(operator_of(_decision), decides=True)
for _fusing in _overloads(_FUSING):
    OPERATORS[_fusing] = replace(operator_of(_fusing), fuses=True)
for _target, _rule in RULES.items():
    OPERATORS[_target] = replace(operator_of(_target), in_slices=_rule)
