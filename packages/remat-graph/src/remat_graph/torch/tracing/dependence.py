"""Which tensors that a forward returns are computed from which others of them.

Autograd's graph of the forward says so while it is traced: it is eager's, with what a change in
place does to views. Of the traced program it cannot be said: there, a view that was taken before
memory was changed, and one that was taken after it of another view, are made alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["dependences"]


def dependences(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Give for each tensor the positions of the others that its gradient goes on to.

    Linear in the nodes of autograd's graph.
    """
    edges = [None if t.grad_fn is None else (t.grad_fn, t.output_nr) for t in tensors]
    own: dict[tuple[Any, int], int] = {}
    for position, edge in enumerate(edges):
        if edge is not None:
            own[edge] = own.get(edge, 0) | 1 << position
    reached: dict[Any, int] = {}
    for node in _behind_first([edge[0] for edge in own]) if len(own) > 1 else ():
        bits = 0
        for following, number in node.next_functions:
            if following is not None:
                bits |= reached[following] | own.get((following, number), 0)
        reached[node] = bits
    return [tuple(_positions(reached.get(edge[0], 0) if edge else 0)) for edge in edges]


def _behind_first(roots: list[Any]) -> Iterator[Any]:
    """Go through the nodes that lead to some, each after all that its gradient goes on to."""
    seen: set[Any] = set()
    for root in roots:
        waiting = [(root, False)]
        while waiting:
            node, is_last = waiting.pop()
            if is_last:
                yield node
            elif node not in seen:
                seen.add(node)
                waiting.append((node, True))
                waiting += [(n, False) for n, _ in node.next_functions if n is not None]


def _positions(bits: int) -> Iterator[int]:
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1
