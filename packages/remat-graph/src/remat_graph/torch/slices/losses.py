"""Rules of losses: a sum of terms is summed, a mean is a sum by shares or by a total weight.

The mean of `nll_loss` is by the weights of what is not ignored: slices make sums of terms and sums
of weights, and the one is divided by the other once both are whole. Its backward is given the whole
weight. That of other means divides by the count of elements, so a slice's share corrects it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from remat_graph.torch.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from remat_graph.torch.slices.placement import SUMMED, Place, Placement, Reading, Rule, Summed

__all__ = ["RULES"]

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction


def _nll_axes(c: Reading, scores: str) -> Iterator[tuple[int, int]]:
    """Pair the axes of scores and of targets, which have no classes."""
    shape = c.shape(scores)
    if len(shape) > 1:
        for axis, size in enumerate(shape):
            if axis != 1 and size > 1:
                yield axis, axis - (axis > 1)


def _nll_loss(c: Reading, scores: str = "self") -> Iterator[Placement]:
    for axis, of_target in _nll_axes(c, scores):
        places = {scores: axis, "target": of_target}
        if c["reduction"] == _NONE:
            yield c.placement(places, [of_target])
        elif c["reduction"] == _SUM:
            yield c.placement(places, [SUMMED, SUMMED])
        else:
            yield c.placement(places, [Summed(over=1), SUMMED], replaced={"reduction": _SUM})


def _nll_loss_backward(
    c: Reading, scores: str = "self", grad: str = "grad_output"
) -> Iterator[Placement]:
    for axis, of_target in _nll_axes(c, scores):
        places = {scores: axis, "target": of_target}
        if c["reduction"] == _NONE:
            places[grad] = of_target
        yield c.placement(places, [axis])


def _is_plain(c: Reading) -> bool:
    """Whether no tensor is broadcast, but the gradient of what is reduced."""
    shapes = {facts.shape for name, facts in c.tensors if name != "grad_output"}
    return len(shapes) == 1


def _loss(c: Reading) -> Iterator[Placement]:
    for axis, size in enumerate(c.shape("self") if _is_plain(c) else ()):
        if size > 1:
            places = {name: axis for name, _ in c.tensors}
            if c["reduction"] == _NONE:
                yield c.placement(places, [axis])
            else:
                share = [0] if c["reduction"] == _MEAN else []
                yield c.placement(places, [SUMMED], by_share=share)


def _with_logits(c: Reading) -> Iterator[Placement]:
    """Follow axes; weights are broadcast."""
    shape = c.shape("self")
    for axis, size in enumerate(shape if shape == c.shape("target") else ()):
        if size > 1:
            behind = axis - len(shape)
            places: dict[str, int | Place] = {
                name: behind + len(facts.shape)
                for name, facts in c.tensors
                if len(facts.shape) >= -behind and facts.shape[behind] > 1
            }
            if c["reduction"] == _NONE:
                yield c.placement(places, [axis])
            else:
                share = [0] if c["reduction"] == _MEAN else []
                yield c.placement(places, [SUMMED], by_share=share)


def _loss_backward(c: Reading) -> Iterator[Placement]:
    for axis, size in enumerate(c.shape("self") if _is_plain(c) else ()):
        if size > 1:
            places = {name: axis for name, _ in c.tensors if name != "grad_output"}
            if c.shape("grad_output") == c.shape("self"):
                places["grad_output"] = axis
            elif c.shape("grad_output"):
                return
            share = [0] if c["reduction"] == _MEAN else []
            yield c.placement(places, [axis], by_share=share)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), _nll_loss),
    cross_entropy: partial(_nll_loss, scores="scores"),
    cross_entropy_backward: partial(_nll_loss_backward, scores="scores", grad="grad"),
    **dict.fromkeys(
        (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), _nll_loss_backward
    ),
    **dict.fromkeys(
        (
            aten.binary_cross_entropy.default,
            aten.huber_loss.default,
            aten.mse_loss.default,
            aten.smooth_l1_loss.default,
            aten.soft_margin_loss.default,
        ),
        _loss,
    ),
    aten.binary_cross_entropy_with_logits.default: _with_logits,
    **dict.fromkeys(
        (
            aten.binary_cross_entropy_backward.default,
            aten.huber_loss_backward.default,
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.soft_margin_loss_backward.default,
        ),
        _loss_backward,
    ),
}
