"""LSTMs on the CPU as one operator for each layer and direction, where eager runs oneDNN's.

Eager takes oneDNN's layers by the type and place of tensors; what it does between them, such as the
dropout, is done here as eager does it. All other RNNs are traced in steps (`rnns`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.overrides import TorchFunctionMode

from remat_graph.torch.kernels.lstm import keeps_what_is_known, lstm_layer
from remat_graph.torch.tracing.overriding import overridden

__all__ = ["LstmInLayers", "lstms_of_any_length"]

_lstm = torch.ops.aten.lstm.input
_CAST = {torch.float32, torch.bfloat16, torch.float16}


class LstmInLayers(TorchFunctionMode):
    """Trace an LSTM as the operators of its layers, where eager runs oneDNN's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function."""
        named = kwargs or {}
        is_lstm = getattr(func, "__name__", "") == "lstm" and not named
        return _in_layers(*args) if is_lstm and _is_onednns(*args) else func(*args, **named)


def lstms_of_any_length() -> contextlib.AbstractContextManager[None]:
    """Let what this thread runs on fake tensors give the sizes of an LSTM without its steps.

    So a length may be a symbol.
    """
    in_steps = _lstm.py_kernels[DispatchKey.Autograd]

    def run(*args: Any) -> Any:
        return (_in_layers if _is_onednns(*args) else in_steps)(*args)

    return overridden(_lstm, run, DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


def _is_onednns(
    x: Any, states: Any, params: Any, has_biases: bool, layers: int, *others: Any
) -> bool:
    """Whether eager runs oneDNN's layers (`use_mkldnn` of ATen/native/RNN.cpp).

    Of a packed sequence `states` are its lengths, a tensor: eager runs it in steps. In float16 it
    has oneDNN's layers for inference alone. A width that is a symbol gives no workspace a size.
    """
    if isinstance(states, Tensor) or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    tensors = [x, *states, *params]
    if not torch._C._get_mkldnn_enabled() or not all(map(_is_plain, tensors)) or 0 in x.shape:
        return False
    types = {each.dtype for each in tensors}
    if torch.is_autocast_enabled("cpu") and types <= _CAST:
        types = {x.dtype, torch.get_autocast_dtype("cpu")}  # the one decides, the other is computed
    elif len(types) > 1:
        return False
    widths = (params[0].shape[1], states[0].shape[2], states[1].shape[2])
    if any(isinstance(each, torch.SymInt) for each in widths) or widths[1] != widths[2]:
        return False  # the last two differ where there are projections
    return types <= _types() and all(map(keeps_what_is_known, types))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def _types() -> set[torch.dtype]:
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return {torch.float32, torch.bfloat16} if has_bfloat16 else {torch.float32}


def _in_layers(
    x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, layers: int,
    dropout: float, training: bool, both_ways: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Do what `mkldnn_rnn` of ATen/native/mkldnn/RNN.cpp does."""
    rows = (x.transpose(0, 1) if batch_first else x).contiguous()
    h0, c0 = (each.contiguous() for each in states)
    ways, of_each = (False, True)[: 1 + both_ways], 4 if has_biases else 2
    ends: list[tuple[Tensor, Tensor]] = []
    made: list[Tensor] = []
    for layer, reverse in product(range(layers), ways):
        if not reverse and layer > 0:
            rows = torch.cat(made, -1) if both_ways else made[0]
            rows = torch.dropout(rows, dropout, train=True) if dropout and training else rows
            made = []
        at = len(ends)
        own = [*params[at * of_each : (at + 1) * of_each], *[None] * (4 - of_each)]
        result, hn, cn, _ = lstm_layer(rows, *own, h0[at], c0[at], reverse, torch.is_grad_enabled())
        made.append(result)
        ends.append((hn, cn))
    rows = torch.cat(made, -1) if both_ways else made[0]
    hn, cn = (torch.stack(each, 0) for each in zip(*ends, strict=True))
    return rows.transpose(0, 1) if batch_first else rows, hn, cn
