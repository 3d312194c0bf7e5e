"""One layer of an LSTM on the CPU in one direction, and its gradients: oneDNN's, as eager runs it.

What eager calls keeps what its backward needs in a workspace of bytes, only where gradients are on,
and torch does not say how large that is before it runs. Here both are operators of known size, that
run wherever a plan has them. Gradients that are to be differentiated again are computed in steps.

The size of the workspace is that of seven buffers in whole pages (oneDNN, `cpu/rnn/rnn_utils.cpp`):
gates, the part of the gates that is recurrent, states, cells and the gradients of both. The formula
is compared with what a small call keeps before any layer is traced so, and with each call that is
run: a workspace that is too small, oneDNN would write past. Its backward writes to parts of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

__all__ = ["keeps_what_is_known", "lstm_layer", "lstm_layer_backward", "workspace_bytes"]

aten = torch.ops.aten

_INPUTS = (
    "Tensor x, Tensor weight_ih, Tensor weight_hh, Tensor? bias_ih, Tensor? bias_hh, "
    "Tensor h0, Tensor c0"
)
_SCHEMA = f"lstm_layer({_INPUTS}, bool reverse, bool keeps) -> (Tensor, Tensor, Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    f"lstm_layer_backward({_INPUTS}, Tensor rows, Tensor hn, Tensor cn, Tensor? of_rows, "
    "Tensor? of_hn, Tensor? of_cn, Tensor workspace, bool reverse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LSTM = 2  # a kind of RNN in oneDNN
_PAGE, _LINE = 4096, 64

_library = torch.library.Library("remat", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(_SCHEMA)  # type: ignore[no-untyped-call]
_library.define(_BACKWARD_SCHEMA)  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "lstm_layer", "CPU")
def _run(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None,
    bias_hh: Tensor | None, h0: Tensor, c0: Tensor, reverse: bool, keeps: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(keeps):
        *results, workspace = aten.mkldnn_rnn_layer.default(
            x, weight_ih, weight_hh, *_biases(weight_ih, weight_hh, bias_ih, bias_hh), h0, c0,
            reverse, [], _LSTM, weight_hh.shape[1], 1, bias_ih is not None, False, False, True,
        )  # fmt: skip
    if workspace is None:
        return *results, x.new_empty(0, dtype=torch.uint8)
    width, hidden = weight_ih.shape[1], weight_hh.shape[1]
    expected = workspace_bytes(x.shape[0], x.shape[1], width, hidden, x.dtype)
    if keeps and workspace.numel() != expected:
        raise RuntimeError(
            f"oneDNN keeps {workspace.numel():,} bytes for a layer of an LSTM, {expected:,} were "
            f"expected: set torch.backends.mkldnn.enabled = False, and LSTMs run in steps"
        )
    return *results, workspace


@torch.library.impl(_library, "lstm_layer_backward", "CPU")
def _run_backward(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None,
    bias_hh: Tensor | None, h0: Tensor, c0: Tensor, rows: Tensor, hn: Tensor, cn: Tensor,
    of_rows: Tensor | None, of_hn: Tensor | None, of_cn: Tensor | None, workspace: Tensor,
    reverse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    with torch._C._AutoDispatchBelowAutograd():
        gradients: tuple[Tensor, ...] = aten.mkldnn_rnn_layer_backward.default(
            x, weight_ih, weight_hh, *_biases(weight_ih, weight_hh, bias_ih, bias_hh), h0, c0,
            rows, hn, cn, of_rows, of_hn, of_cn, reverse, _LSTM, weight_hh.shape[1], 1,
            bias_ih is not None, True, False, [], False, workspace,
        )  # fmt: skip
    return gradients


def _biases(weight_ih: Tensor, weight_hh: Tensor, *biases: Tensor | None) -> list[Tensor]:
    """Give tensors in the place of biases that are not there, as eager does: nothing reads them."""
    return [
        weight if bias is None else bias
        for weight, bias in zip((weight_ih, weight_hh), biases, strict=True)
    ]


@torch.library.impl(_library, "lstm_layer", "AutocastCPU")
def _run_in_16_bits(*args: Any) -> Any:
    """Cast what autocast casts for oneDNN's layer."""
    dtype = torch.get_autocast_dtype("cpu")
    only = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(only):
        return lstm_layer(*(x.to(dtype) if isinstance(x, Tensor) else x for x in args))


@torch.library.register_fake("remat::lstm_layer", lib=_library)  # type: ignore[untyped-decorator]
def _predict(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None,
    bias_hh: Tensor | None, h0: Tensor, c0: Tensor, reverse: bool, keeps: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    steps, batch = x.shape[:2]
    hidden = weight_hh.shape[1]
    size = workspace_bytes(steps, batch, weight_ih.shape[1], hidden, x.dtype) if keeps else 0
    return (
        x.new_empty((steps, batch, hidden)),
        h0.new_empty(h0.shape),
        c0.new_empty(c0.shape),
        x.new_empty((size,), dtype=torch.uint8),
    )


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "remat::lstm_layer_backward", lib=_library
)
def _predict_backward(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None,
    bias_hh: Tensor | None, h0: Tensor, c0: Tensor, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    bias = weight_ih.shape[:1]
    shapes = (x.shape, weight_ih.shape, weight_hh.shape, bias, bias, h0.shape, c0.shape)
    return tuple(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.reverse, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
    saved, of_results = ctx.saved_tensors, of_results[:3]
    inputs, results, workspace = saved[:7], saved[7:10], saved[10]
    if all(each is None for each in of_results):
        return (None,) * 9
    if torch.is_grad_enabled():
        gradients = _gradients_in_steps(inputs, of_results, ctx.reverse)
    else:
        gradients = lstm_layer_backward(*inputs, *results, *of_results, workspace, ctx.reverse)
    there = zip(inputs, gradients, strict=True)
    return *(None if own is None else gradient for own, gradient in there), None, None


torch.library.register_autograd(
    "remat::lstm_layer", _differentiate, setup_context=_keep, lib=_library
)

lstm_layer = torch.ops.remat.lstm_layer.default
lstm_layer_backward = torch.ops.remat.lstm_layer_backward.default


def _gradients_in_steps(
    inputs: Sequence[Tensor | None], of_results: Sequence[Tensor | None], reverse: bool
) -> list[Tensor | None]:
    """Give gradients that can be differentiated: those of the operators of all steps."""
    own = [None if each is None else each.view_as(each) for each in inputs]  # each by itself
    results = _run_in_steps(*own, reverse=reverse)  # type: ignore[arg-type]
    come = [pair for pair in zip(results, of_results, strict=True) if pair[1] is not None]
    wanted = [each for each in own if each is not None and each.requires_grad]
    found = iter(
        torch.autograd.grad(
            [result for result, _ in come], wanted, [of_result for _, of_result in come],
            create_graph=True, allow_unused=True,
        )
    )  # fmt: skip
    return [None if each is None or not each.requires_grad else next(found) for each in own]


def _run_in_steps(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias_ih: Tensor | None,
    bias_hh: Tensor | None, h: Tensor, c: Tensor, *, reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    made = []
    rows = linear(x, weight_ih, bias_ih).unbind(0)
    for row in reversed(rows) if reverse else rows:
        new, forget, cell, out = (row + linear(h, weight_hh, bias_hh)).chunk(4, 1)
        c = forget.sigmoid() * c + new.sigmoid() * cell.tanh()
        h = out.sigmoid() * c.tanh()
        made.append(h)
    return torch.stack(made[::-1] if reverse else made), h, c


def workspace_bytes(steps: Any, batch: Any, width: int, hidden: int, dtype: torch.dtype) -> Any:
    """Give the bytes that oneDNN keeps for the backward of a layer; `width` is that of its input.

    Steps and batch may be symbols.
    """
    widest, itemsize = max(width, hidden), dtype.itemsize
    rows, states = steps * batch, 2 * (steps + 1) * batch
    gradients = states * _row_bytes(widest, 4)
    buffers = (
        rows * _row_bytes(4 * hidden, itemsize),
        rows * _row_bytes(hidden, itemsize),
        states * _row_bytes(widest, itemsize),
        states * hidden * itemsize,
        states * hidden * 4,
        gradients,
        gradients,
    )
    return sum((each + _PAGE - 1) // _PAGE * _PAGE for each in buffers)


def _row_bytes(length: int, itemsize: int) -> int:
    """Give the bytes from one row to the next: whole lines of the cache, never 256 elements."""
    per_line = _LINE // itemsize
    length = -(-length // per_line) * per_line
    return (length + per_line * (length % 256 == 0)) * itemsize


@functools.cache
def keeps_what_is_known(dtype: torch.dtype) -> bool:
    """Whether oneDNN keeps as much as is expected here, by a call of a few kilobytes."""
    steps, batch, width, hidden = 3, 5, 20, 17
    shapes = (
        (steps, batch, width), (4 * hidden, width), (4 * hidden, hidden), (4 * hidden,),
        (4 * hidden,), (batch, hidden), (batch, hidden),
    )  # fmt: skip
    with _disable_current_modes(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
        tensors = [torch.zeros(shape, dtype=dtype, device="cpu") for shape in shapes]
        x, weight_ih, weight_hh, bias_ih, bias_hh, h0, c0 = tensors
        try:
            _run(x, weight_ih, weight_hh, bias_ih, bias_hh, h0, c0, False, True)
        except RuntimeError:
            return False
        return True


@register_flop_formula(torch.ops.remat.lstm_layer)
def _flops(
    x: Sequence[int], weight_ih: Sequence[int], weight_hh: Sequence[int], *_: Any, **__: Any
) -> int:
    steps, batch = x[:2]
    return 2 * steps * batch * weight_hh[0] * (weight_ih[1] + weight_hh[1])


@register_flop_formula(torch.ops.remat.lstm_layer_backward)
def _backward_flops(*shapes: Any, **_: Any) -> int:
    return 2 * int(_flops(*shapes))
