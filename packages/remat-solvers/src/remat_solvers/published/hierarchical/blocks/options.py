"""Options of a block: schedules of its two halves that trade time against memory.

HiRemate, section 3.2 and B.1.1. An option says which ops the forward half runs and which the
backward half does, recomputations included; what the backward half reads of the forward half is
kept between them (the phantom node of the paper). Every value is freed right after its last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat_solvers.core.pareto import pareto_front
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.published.hierarchical.blocks.runs import saved_between

__all__ = ["BlockOption", "choose", "read_option", "shares"]


@dataclass(frozen=True, slots=True)
class BlockOption:
    """A schedule of a block: op positions in its subgraph, forward then backward.

    `peak_bytes` is that of the closed block; `saved_bytes` is kept between the halves, outputs of
    the block not counted.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    time: float
    peak_bytes: int
    saved_bytes: int


def read_option(wiring: Wiring, sequence: Ints) -> BlockOption | None:
    """Read an option off a sequence of computations of a closed block.

    `None` if a backward op comes before the rest of the step, which no option can express.
    """
    elsewhere = wiring.graph.boundary_index
    order: list[int] = sequence.tolist()
    middle = order.index(elsewhere)
    forward, backward = order[:middle], order[middle + 1 :]
    if any(op > elsewhere for op in forward):
        return None
    saved = saved_between(wiring, forward, backward, wiring.inputs[elsewhere])
    return BlockOption(
        forward=tuple(forward),
        backward=tuple(op - 1 if op > elsewhere else op for op in backward),
        time=sequence_time(wiring, sequence),
        peak_bytes=trace(wiring, sequence).peak_bytes,
        saved_bytes=int(wiring.size[sorted(saved)].sum()),
    )


def choose(options: Iterable[BlockOption], most: int) -> tuple[BlockOption, ...]:
    """Choose up to `most` options whose memory is farthest apart (HiRemate, section 3.2.2).

    Options that another one beats in time, peak and saved bytes are left out. The one with the
    most saved bytes first, then the one with the fewest, then always the one farthest, in saved
    bytes and peak, from those chosen. Returned by falling saved bytes.
    """
    front = _undominated(options)
    if not front:
        return ()
    widest_saved = max(1, front[0].saved_bytes - front[-1].saved_bytes)
    peaks = [option.peak_bytes for option in front]
    widest_peak = max(1, max(peaks) - min(peaks))

    def apart(one: BlockOption, other: BlockOption) -> float:
        saved = abs(one.saved_bytes - other.saved_bytes) / widest_saved
        return saved + abs(one.peak_bytes - other.peak_bytes) / widest_peak

    chosen = [front[0]]
    if most > 1 and len(front) > 1:
        chosen.append(front[-1])
    while len(chosen) < min(most, len(front)):
        rest = [option for option in front if option not in chosen]
        chosen.append(max(rest, key=lambda one: min(apart(one, other) for other in chosen)))
    return tuple(option for option in front if option in chosen)


def _undominated(options: Iterable[BlockOption]) -> list[BlockOption]:
    """Sort by falling saved bytes, the option that stores everything first."""
    by_time = sorted(
        set(options), key=lambda o: (o.time, o.saved_bytes, o.peak_bytes, o.forward, o.backward)
    )
    front = pareto_front(by_time, lambda o: (o.time, o.saved_bytes, o.peak_bytes))
    return sorted(front, key=lambda o: (-o.saved_bytes, -o.peak_bytes, o.time))


def shares(op_counts: Sequence[int], total: int) -> list[int]:
    """Share out `total` options among blocks in proportion to their ops; at least 2 each."""
    every = max(1, sum(op_counts))
    return [max(2, round(total * count / every)) for count in op_counts]
