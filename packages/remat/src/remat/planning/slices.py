"""Which programs a region is planned as where rounding may differ: also with cuts in slices.

How fine a cut is made is settled by what it needs and by its times: the fastest number of slices,
as fine as takes a tenth more time, and as fine as lowers what is needed, down to a tenth of what
the budget leaves. Source: Mini-sequence (Luo and others 2024), section 4, for numbers of slices;
here they are searched by doubling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from remat.report.words import mib
from remat_graph import Graph, Numerics, Solution
from remat_graph.torch import Capture
from remat_solvers import BudgetTooSmall

__all__ = ["SlicedPrograms", "note_what_slices_reach", "programs_by_cuts", "sliced_programs"]

_SLOWER = 1.1  # times the fastest number of slices
_SHRINKS = 0.9  # of what half as many slices need
_TENTH = 10
_MOST = 1024  # slices
_COARSER = (4, 16)  # times as few slices as the finest, which are timed, too


@dataclass(frozen=True, slots=True)
class SlicedPrograms:
    """Programs in which the same kinds of cuts run in slices, in several numbers of them.

    In `relaxed` each op takes the least time and workspace that it takes in any number that was
    looked at: what holds for its schedules holds for those of all programs.
    """

    programs: tuple[Capture, ...]
    relaxed: Graph


def sliced_programs(captured: Capture, target: int) -> list[Capture]:
    """List the programs with slices that may be worth a plan within so many bytes."""
    return [each for group in programs_by_cuts(captured, target) for each in group.programs]


def programs_by_cuts(captured: Capture, target: int) -> list[SlicedPrograms]:
    """Give these programs, those with the same kinds of cuts together."""
    if captured.numerics is None or not captured.numerics.allows(Numerics.ROUNDING):
        return []
    levels = [_levels(captured, kind, target) for kind in range(len(captured.cuts))]
    by_kinds: dict[tuple[int, ...], dict[tuple[tuple[int, int], ...], None]] = {}
    for count, level in itertools.product(range(1, len(levels) + 1), range(3)):
        slices = [each.chosen[level] for each in levels[:count]]
        sliced = tuple((kind, number) for kind, number in enumerate(slices) if number > 1)
        if sliced:
            by_kinds.setdefault(tuple(kind for kind, _ in sliced), {})[sliced] = None
    groups = []
    for kinds, chosen in by_kinds.items():
        programs = tuple(captured.in_slices(sliced) for sliced in chosen)
        numbers = zip(*(levels[kind].numbers for kind in kinds), strict=True)
        graphs = [captured.in_slices(list(zip(kinds, each, strict=True))).graph for each in numbers]
        groups.append(SlicedPrograms(programs, _least_of(graphs)))
    return groups


def _least_of(graphs: Sequence[Graph]) -> Graph:
    """Let each op take the least that it takes in any of these graphs, which differ in costs."""
    ops = []
    for alike in zip(*(graph.ops for graph in graphs), strict=True):
        assert len({(op.inputs, op.outputs) for op in alike}) == 1, alike
        ops.append(
            replace(
                alike[0],
                time=min(op.time for op in alike),
                workspace_bytes=min(op.workspace_bytes for op in alike),
            )
        )
    return replace(graphs[0], ops=tuple(ops))


def note_what_slices_reach(
    error: BudgetTooSmall, offered: Capture, solve_for: Callable[[Graph], Solution]
) -> None:
    """Add to a refusal what the same step takes with its largest values made in slices."""
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
            f"sums: then about {mib(reach)} are enough."
        )


def _with_finest_slices(captured: Capture) -> Capture | None:
    """Cut all that can be, as fine as that lowers what is needed; `None` if nothing can be cut.

    By estimates: nobody waits for a refusal until slices are measured.
    """
    if not captured.cuts:
        return None
    plain = captured.without_alternatives().costed("estimate")
    able = plain.with_alternatives(Numerics.ROUNDING, laid_out=())
    return able.in_slices([(kind, _finest(able, kind, 0)) for kind in range(len(able.cuts))])


@dataclass(frozen=True, slots=True)
class _Levels:
    """Numbers of slices of a kind: those that were timed, and three that were chosen of them."""

    numbers: tuple[int, ...]
    chosen: tuple[int, int, int]


def _levels(captured: Capture, kind: int, target: int) -> _Levels:
    """Choose the fastest number of slices, as fine as is nearly as fast, and the finest."""
    finest = _finest(captured, kind, target)
    numbers = [max(1, finest // share) for share in (1, *_COARSER)]
    seconds = {number: captured.seconds_of_slices(kind, number) for number in numbers}
    fastest = min(seconds, key=lambda number: (seconds[number], number))
    nearly = max(n for n in numbers if seconds[n] <= _SLOWER * seconds[fastest])
    return _Levels(tuple(numbers), (fastest, nearly, finest))


def _finest(captured: Capture, kind: int, target: int) -> int:
    """Double the slices as long as they need less, down to a tenth of what others may hold."""
    most = min(_MOST, *(cut.units for cut in captured.cuts[kind]))
    slices, needed = 1, captured.bytes_of_slices(kind, 1)
    while slices < most and needed * _TENTH > target:
        finer = min(2 * slices, most)
        needs = captured.bytes_of_slices(kind, finer)
        if needs > _SHRINKS * needed:
            break
        slices, needed = finer, needs
    return slices
