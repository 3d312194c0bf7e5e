"""What the values of a program take, as a function of the numbers of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from remat_graph.torch.tracing.joint_of_sizes import Numbers, Slot, Traced

__all__ = ["ValueBytes", "bytes_of_sum"]


class ValueBytes:
    """The bytes of each of `values` on a device; of those with `terms`, of the sum of these.

    The function is compiled: it is asked for each call of a new size.
    """

    def __init__(
        self,
        values: Mapping[str, Traced],
        terms: Mapping[str, Sequence[Traced]],
        device: torch.device,
    ) -> None:
        texts: dict[str, int] = {}
        places = []
        for value, traced in values.items():
            shapes = [term.shape for term in terms.get(value, ())]
            text = _sum_text(traced.dtype, *shapes) if shapes else _dense_text(traced)
            if traced.device.type != device.type:
                text = "0"
            elif device.type == "cuda":
                text = f"-(-{text} // 512) * 512"
            places.append(texts.setdefault(text, len(texts)))
        self.places = {value: at for at, value in enumerate(values)}
        self._places = places
        self._compute: Callable[[Numbers], tuple[int, ...]] = eval(
            f"lambda n: ({''.join(f'{text}, ' for text in texts)})", {"dim": _broadcast}
        )

    def __call__(self, numbers: Numbers) -> list[int]:
        """Compute the bytes, in the order of `places`."""
        computed = self._compute(numbers)
        return [computed[at] for at in self._places]


def bytes_of_sum(dtype: torch.dtype, one: Sequence[int], other: Sequence[int]) -> int:
    """Give the bytes of a sum that lies in the memory of its terms, of tensors of these shapes."""
    shape: torch.Size = torch.broadcast_shapes(tuple(one), tuple(other))  # type: ignore[no-untyped-call]
    return max(1, math.prod(shape)) * dtype.itemsize


def _dense_text(traced: Traced) -> str:
    """Write the bytes that a tensor alone in its memory takes."""
    if 0 in traced.shape:
        return "0"
    pairs = zip(traced.shape, traced.stride, strict=True)
    reach = [f"({_text(size)} - 1) * {_text(step)}" for size, step in pairs]
    count = f"({' + '.join([_text(traced.offset), '1', *reach])}) * {traced.dtype.itemsize}"
    sizes = dict.fromkeys(_text(size) for size in traced.shape if isinstance(size, Slot))
    return f"({count} if {' and '.join(sizes)} else 0)" if sizes else f"({count})"


def _sum_text(dtype: torch.dtype, one: Sequence[Any], other: Sequence[Any]) -> str:
    """Write what `bytes_of_sum` computes."""
    length = max(len(one), len(other))
    shapes = ([1] * (length - len(shape)) + list(shape) for shape in (one, other))
    sizes = [_broadcast_text(*map(_text, pair)) for pair in zip(*shapes, strict=True)]
    return f"(max(1, {' * '.join(sizes) or '1'}) * {dtype.itemsize})"


def _broadcast_text(one: str, other: str) -> str:
    if one in ("1", other):
        return other
    return one if other == "1" else f"dim({one}, {other})"


def _text(size: Any) -> str:
    return f"n[{size.index}]" if isinstance(size, Slot) else repr(size)


def _broadcast(one: int, other: int) -> int:
    return other if one == 1 else one
