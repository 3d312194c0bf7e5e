"""What TorchDynamo needs so that a number stays a symbol where torch would take it as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from remat_graph.torch.tracing.lstm_in_layers import lstms_of_any_length
from remat_graph.torch.tracing.symbolic_math import symbolic_math

__all__ = ["symbols_kept"]


@contextmanager
def symbols_kept() -> Iterator[None]:
    """Keep functions of `math` and the lengths of LSTMs as symbols; while Dynamo's lock is held."""
    with symbolic_math(), lstms_of_any_length():
        yield
