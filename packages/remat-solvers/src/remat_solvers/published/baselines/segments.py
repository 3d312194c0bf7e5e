"""Checkpoints of the forward half as a choice of what is kept at each stage (Checkmate's S).

The checkpoints cut the forward ops, in the order of the graph, into segments. Kept are: what the
checkpoint ops make; what the ops after the last checkpoint make, which backward reads first;
gradients and results; everything else made forward up to its last use there. When backward comes
to a segment, the segment is computed again and kept until backward leaves it (Chen et al. 2016,
algorithm 1). What is read out of turn is computed again for that one stage, as in Checkmate's
generalisation: S by rule, then the least R (`Stages.least_run`).
Complexity: O(stages x values).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat_solvers.published.baselines.forward import turns
from remat_solvers.published.checkmate.stages import Bits, Stages

__all__ = ["every_root", "greedy_choices", "keep_segments"]

_SIZES = 64


def keep_segments(stages: Stages, checkpoints: Sequence[int]) -> Bits:
    """Say what is kept at each stage for checkpoints (forward ops, ascending)."""
    wiring = stages.wiring
    boundary = wiring.graph.boundary_index
    chosen = np.array(checkpoints, dtype=np.int64)
    producer = wiring.producer
    segment = np.searchsorted(chosen, producer)
    always = (producer >= boundary) | np.isin(producer, chosen) | (segment == len(chosen))
    always[wiring.results] = True

    turn = np.searchsorted(chosen, turns(stages))
    numbers = np.arange(len(chosen) + 1)
    # `turn` never rises, so a segment's stages are one stretch.
    opens = boundary + np.searchsorted(-turn, -numbers, side="left")
    closes = boundary + np.searchsorted(-turn, -numbers, side="right") - 1

    forward = stages.read_op < boundary
    last_forward = producer.copy()
    np.maximum.at(last_forward, stages.read_value[forward], stages.read_op[forward])
    backward = stages.last_read >= boundary
    stage = np.arange(stages.count)[:, None]
    again = (stage > opens[segment]) & (stage <= np.minimum(closes[segment], stages.last_read))
    kept: Bits = always | (stage <= last_forward) | (backward & again)
    kept &= stages.may_keep()
    return kept


def every_root(candidates: Sequence[int]) -> list[int]:
    """Choose every k-th candidate, k the root of their number (Chen et al. 2016, section 4.1)."""
    step = max(1, int(len(candidates) ** 0.5))
    return list(candidates[step - 1 :: step])


def greedy_choices(stages: Stages, candidates: Sequence[int]) -> list[tuple[float, list[int]]]:
    """List the different choices of Chen's greedy rule over segment sizes b, with their b.

    Algorithm 3: walk the forward ops, adding up what they make; a candidate at which more than b
    bytes have come together ends the segment.
    """
    wiring = stages.wiring
    output_bytes = wiring.output_bytes[: wiring.graph.boundary_index]
    total = sum(output_bytes)
    least = min((size for size in output_bytes if size), default=1)
    allowed = set(candidates)
    choices: dict[tuple[int, ...], float] = {}
    for size in [0.0, *np.geomspace(least, max(total, least), _SIZES).tolist()]:
        chosen: list[int] = []
        together = 0
        for op, more in enumerate(output_bytes):
            together += more
            if op in allowed and together > size:
                chosen.append(op)
                together = 0
        choices.setdefault(tuple(chosen), size)
    return [(size, list(chosen)) for chosen, size in choices.items()]
