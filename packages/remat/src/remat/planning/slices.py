"""Which programs a region is planned as where rounding may differ: also with cuts in slices.

How fine a cut is made is settled by its measured or estimated times: at most as fine as slices
take a tenth more time than the fastest number of slices, or, where a budget asks for it, as fine as
what they hold still shrinks. Source: Mini-sequence (Luo and others 2024), section 4, for numbers of
slices; here they are searched by doubling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat.report.words import mib
from remat_graph import Graph, Numerics, Solution
from remat_graph.torch import Capture
from remat_solvers import BudgetTooSmall

__all__ = ["note_what_slices_reach", "sliced_programs"]

_SLOWER = 1.1  # times the fastest number of slices
_SHRINKS = 0.9  # of what fewer slices hold
_MOST = 1024  # slices


@dataclass(frozen=True, slots=True)
class _Choice:
    """A number of slices: the seconds that the cuts take, and what one needs at most."""

    slices: int
    seconds: float
    bytes: int


def sliced_programs(captured: Capture, target: int) -> list[Capture]:
    """List the programs with slices that may be worth a plan within so many bytes."""
    if captured.numerics is None or not captured.numerics.allows(Numerics.ROUNDING):
        return []
    levels = [_levels(captured, kind, target) for kind in range(len(captured.cuts))]
    chosen = dict.fromkeys(
        tuple((kind, levels[kind][level]) for kind in range(count) if levels[kind][level] > 1)
        for level in range(3)
        for count in range(1, len(levels) + 1)
    )
    return [captured.in_slices(sliced) for sliced in chosen if sliced]


def note_what_slices_reach(
    error: BudgetTooSmall, offered: Capture, solve_for: Callable[[Graph], Solution]
) -> None:
    """Say beside a refusal what the same step takes with its largest values made in slices."""
    sliced = _with_finest_slices(offered)
    if sliced is None:
        return
    try:
        solve_for(sliced.graph)
        reach = error.budget_bytes
    except BudgetTooSmall as still:
        reach = still.smallest_bytes
    if reach < error.smallest_bytes:
        error.add_note(
            f"With numerics='rounding' the largest values are made in slices, in another order of "
            f"sums: then {mib(reach)} are enough."
        )


def _with_finest_slices(captured: Capture) -> Capture | None:
    """Cut all that can be, as fine as that lowers what is held; `None` if nothing can be cut."""
    if not captured.cuts:
        return None
    able = captured.without_alternatives().with_alternatives(Numerics.ROUNDING, laid_out=())
    finest = [(kind, _levels(able, kind, 0)[-1]) for kind in range(len(able.cuts))]
    return able.in_slices(finest)


def _levels(captured: Capture, kind: int, target: int) -> tuple[int, int, int]:
    """Choose three numbers of slices: the fastest, as fine as is nearly as fast, and the finest.

    None is finer than is of use: where a slice takes a tenth of the target, others hold the most.
    """
    choices: list[_Choice] = []
    for choice in _tried(captured, kind):
        choices.append(choice)
        if choice.bytes * 10 <= target:
            break
        if len(choices) > 1 and choice.bytes > _SHRINKS * choices[-2].bytes:
            break
    fastest = min(choices, key=lambda choice: choice.seconds)
    nearly = [choice for choice in choices if choice.seconds <= _SLOWER * fastest.seconds]
    return fastest.slices, nearly[-1].slices, choices[-1].slices


def _tried(captured: Capture, kind: int) -> Iterator[_Choice]:
    """Cost a kind of cuts in 1, 2, 4 … slices."""
    most = min(_MOST, *(cut.units for cut in captured.cuts[kind]))
    numbers = dict.fromkeys(min(1 << n, most) for n in range(_MOST.bit_length()))
    for slices in numbers:
        cost = captured.cost_of_slices(kind, slices)
        yield _Choice(slices, cost.time, cost.workspace_bytes)
