"""Which program a region runs as that shares its budget with others.

Each region has one program, for which its options are solved. It runs in slices only where some op
of the whole needs more than half of the budget, since other regions keep something, too. It runs
compiled groups wherever these are asked for. Options are without alternatives, and so are these
programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from remat.planning.certain_bound import forward_bound
from remat.planning.slices import sliced_programs, with_finest_slices
from remat_graph import Numerics
from remat_graph.torch import Capture
from remat_solvers.toolkit import Wiring, least_time, peak_bound

__all__ = [
    "alone",
    "has_room",
    "in_finest_slices_alone",
    "in_groups",
    "in_ways_alone",
    "may_have_groups",
    "region_program",
]


def region_program(captured: Capture, budget: int | None) -> tuple[Capture, int | None]:
    """Choose the program of a region, and bound what the forward of any such program needs.

    It is the fastest of those whose ops need no more than half of the budget each, else the one
    whose ops need the least. While no budget is known nothing is in slices, and nothing is bound.
    """
    able = captured.with_alternatives(Numerics.ROUNDING, laid_out=())
    whole = able if able.has_other_ops else captured
    if budget is None:
        return whole, None
    if has_room(whole, budget) or not captured.cuts:
        return whole, forward_bound(alone(whole)).peak_bytes
    programs = [whole, *sliced_programs(able, budget)]
    fitting = [program for program in programs if has_room(program, budget)]
    chosen = (
        min(fitting, key=lambda program: least_time(Wiring.of(alone(program).graph)))
        if fitting
        else min(programs, key=_needs)
    )
    return chosen, min(forward_bound(alone(program)).peak_bytes for program in programs)


def has_room(program: Capture, budget: int) -> bool:
    """Whether each op of a region needs no more than half of the budget."""
    return 2 * _needs(program) <= budget


def in_groups(able: Capture) -> Capture:
    """Give a program of a region, which may have groups, with compiled ones.

    Raises:
        CaptureError: if an operator cannot be measured.
    """
    grouped = able.in_groups()
    grouped.compile_groups()
    return grouped


def may_have_groups(captured: Capture) -> Capture:
    """Give a program of a region that may round otherwise, as compiled groups do."""
    if captured.numerics is not None:
        return captured
    return captured.with_alternatives(Numerics.ROUNDING, laid_out=())


def in_ways_alone(
    captured: Capture, sliced: Sequence[tuple[int, int]], unfused: Sequence[int] | None
) -> Capture:
    """Give a capture in these slices and groups, without alternatives."""
    able = captured.with_alternatives(Numerics.ROUNDING, laid_out=()).in_slices(sliced)
    if unfused is not None:
        able = able.in_groups(unfused)
        able.compile_groups()
    return alone(able)


def in_finest_slices_alone(captured: Capture) -> Capture | None:
    """Give a capture in its finest slices, by estimates; `None` if nothing can be cut."""
    sliced = with_finest_slices(captured)
    return None if sliced is None else alone(sliced)


def alone(program: Capture) -> Capture:
    """Give a program without the alternatives among which options do not choose."""
    graph = program.graph
    return (
        replace(program, graph=graph.without_alternatives()) if graph.has_alternatives else program
    )


def _needs(program: Capture) -> int:
    return peak_bound(Wiring.of(alone(program).graph)).peak_bytes
