"""Which budgets a block is planned for, to get options worth choosing from.

HiRemate plans every block at several peaks. What a block keeps between its halves counts for the
whole step, though, and its peak only while it runs, and recomputing everything in the backward half
has the peak of storing everything. So a target is a pair: a budget for the peak and one for what is
kept. The second is asked for by withholding the rest while the rest of the step runs (`closed`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from remat_solvers.core.wiring import Wiring
from remat_solvers.published.hierarchical.blocks.options import BlockOption, read_option
from remat_solvers.search.descent import minimal_peak_trace

__all__ = ["Target", "targets_of"]

_SAVED = (1.0, 0.7, 0.5, 0.3, 0.15, 0.0)
_PEAKS = (1.0, 0.5, 0.1)
_PROBE_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Target:
    """A budget for the peak of a closed block, of which some is withheld between its halves."""

    peak_bytes: int
    withheld_bytes: int


def targets_of(wiring: Wiring, deadline: float) -> tuple[list[BlockOption], list[Target]]:
    """List the options of a closed block that are there at once, and the targets to plan it for.

    The peak is that of storing everything, or halfway down to the smallest found; what may be kept
    falls from what storing everything keeps to nothing.
    """
    full = read_option(wiring, np.arange(wiring.op_count))
    if full is None:
        raise ValueError("the halves of a block are out of order")
    until = min(deadline, time.perf_counter() + _PROBE_SECONDS)
    smallest = read_option(wiring, minimal_peak_trace(wiring, until).sequence)
    options = [full] if smallest is None else [full, smallest]
    least = options[-1].peak_bytes
    elsewhere = wiring.graph.boundary_index
    border = wiring.inputs[elsewhere] + wiring.outputs[elsewhere]
    around = int(wiring.size[list(border)].sum())
    targets = []
    for share in _PEAKS:
        peak = least + int(share * (full.peak_bytes - least))
        for kept in _SAVED:
            withheld = max(0, peak - around - int(kept * full.saved_bytes))
            targets.append(Target(peak, withheld))
    return options, list(dict.fromkeys(targets))
