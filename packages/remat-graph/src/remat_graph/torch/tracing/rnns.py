"""RNNs as the operators of their steps, with the dropout between their layers, which torch loses.

The function in which torch decomposes an RNN asks wrongly for the last layer, and so leaves the
dropout out after every one. Here it runs once for each layer, with the dropout between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import decompositions
from torch.overrides import TorchFunctionMode

from remat_graph.torch.errors import CaptureError

__all__ = ["RnnInSteps", "draws_otherwise", "other_draws"]

_RNNS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_HELPER = "_rnn_helper"
_AS_TRACED = ("cpu", "meta")


def draws_otherwise(module: torch.nn.Module, *, on_cuda: bool = False) -> bool:
    """Whether an RNN in training has dropout between its layers that no trace draws as eager does.

    So it is on CUDA: cuDNN's operator draws from a stream of its own.
    """
    return any(
        isinstance(part, torch.nn.RNNBase)
        and part.training
        and bool(part.dropout)
        and part.num_layers > 1
        and (on_cuda or any(each.device.type not in _AS_TRACED for each in part.parameters()))
        for part in module.modules()
    )


def other_draws(name: str, dropout: float) -> CaptureError:
    """Give the refusal of an RNN on CUDA with dropout between its layers."""
    return CaptureError(
        f"{name} has dropout={dropout} between its layers, which cuDNN draws on CUDA from a stream "
        f"of its own: no trace draws the same. Stack RNNs of one layer each, with nn.Dropout "
        f"between them"
    )


class RnnInSteps(TorchFunctionMode):
    """Trace an RNN on the CPU as the operators of its steps, but for what is traced by layers.

    Of an LSTM torch would trace oneDNN's layers where no input has a gradient. That switch, and
    torch's function, are of the process: others would compute other bits meanwhile, so they are
    changed while an RNN is traced and no longer.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, and an RNN without oneDNN and layer by layer."""
        if getattr(func, "__name__", "") not in _RNNS:
            return func(*args, **(kwargs or {}))
        flags: Any = torch.backends.mkldnn
        before, helper = flags.enabled, getattr(decompositions, _HELPER)
        flags.enabled = False
        setattr(decompositions, _HELPER, _layer_by_layer(helper))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            flags.enabled = before
            setattr(decompositions, _HELPER, helper)


def _layer_by_layer(helper: Callable[..., Any]) -> Callable[..., Any]:
    """Give torch's function with the dropout that it loses, drawn in the order of eager."""

    def run(
        rows: torch.Tensor,
        hidden: Sequence[Any],
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        layer_fn: Callable[..., Any],
    ) -> tuple[torch.Tensor, list[Any]]:
        ways = 2 if bidirectional else 1
        rows = rows.transpose(0, 1) if batch_first else rows
        ends: list[Any] = []
        for layer in range(num_layers):
            if layer > 0 and train and dropout:
                if rows.device.type not in _AS_TRACED:
                    raise other_draws("an RNN", dropout)
                rows = torch.dropout(rows, dropout, train=True)
            own = slice(layer * ways, (layer + 1) * ways)
            rows, last = helper(
                rows, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False,
                layer_fn,
            )  # fmt: skip
            ends += last
        return rows.transpose(0, 1) if batch_first else rows, ends

    return run
