"""What a plan says that is of one region: its capture, and how it was solved."""

from __future__ import annotations

from typing import Any

from remat.plans.origin import Origin
from remat.report.readable_plan import ReadablePlan
from remat_graph import Solution
from remat_graph.torch import Capture

__all__ = ["readable_plan"]


def readable_plan(
    captured: Capture,
    solution: Solution,
    budget: int,
    *,
    whole_time: float | None = None,
    **facts: Any,
) -> ReadablePlan:
    """Make the plan of a capture that is all of the step, as it was solved for.

    One in slices says what the whole takes, stored: by the costs of the capture, unless given.
    """
    assert solution.schedule is not None
    if captured.sliced and whole_time is None:
        whole_time = captured.without_alternatives().graph.time
    deferred = sorted(captured.program.deferred)
    return ReadablePlan.of_one_region(
        captured.graph,
        solution.schedule,
        solution,
        budget,
        missing=captured.missing,
        released_outputs=captured.released_outputs,
        laid_out=captured.laid_out,
        sliced=captured.sliced,
        unfused=captured.unfused,
        gives_again=captured.gives_again,
        deferred=tuple((p, captured.deferred_bytes(frozenset({p}))) for p in deferred),
        left_out=captured.left_out,
        origin=Origin.here(captured.program.device),
        whole_time=whole_time if captured.sliced else None,
        **facts,
    )
