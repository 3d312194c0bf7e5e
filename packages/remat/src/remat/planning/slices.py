"""Which programs a region is planned as where rounding may differ: also with cuts in slices.

How fine a cut is made is settled by plans: in as many slices as lower what is needed, down to a
tenth of what the budget leaves, in a quarter and in a sixteenth of them. Source: Mini-sequence (Luo
and others 2024), section 4, for numbers of slices; here they are searched by doubling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from remat.report.words import mib
from remat_graph import Graph, Numerics, Solution
from remat_graph.torch import Capture
from remat_solvers import BudgetTooSmall

__all__ = [
    "SlicedPrograms",
    "note_reach",
    "note_what_slices_reach",
    "programs_by_cuts",
    "sliced_programs",
    "whole_programs",
    "with_finest_slices",
]

_SHRINKS = 0.9  # of what half as many slices need
_TENTH = 10
_MOST = 1024  # slices
_SHARES = (1, 4, 16)  # times as few slices as the finest


@dataclass(frozen=True, slots=True)
class SlicedPrograms:
    """Programs in which the same kinds of cuts run in slices, in several numbers of them.

    In `relaxed` each op takes the least time and workspace that it takes in any number that was
    looked at: what holds for its schedules holds for those of all programs.
    """

    programs: tuple[Capture, ...]
    relaxed: Graph


def whole_programs(captured: Capture) -> list[Capture]:
    """List the programs without slices that a region may be planned as, the fastest first.

    Layouts and compiled groups were chosen for a fastest step without a look at the budget.
    """
    programs = [
        captured,
        captured.giving_again(),
        captured.in_traced_layouts(),
        captured.without_groups(),
    ]
    return [each for at, each in enumerate(programs) if not at or each is not captured]


def sliced_programs(captured: Capture, target: int) -> list[Capture]:
    """List the programs with slices that may be worth a plan within so many bytes."""
    return [each for group in programs_by_cuts(captured, target) for each in group.programs]


def programs_by_cuts(captured: Capture, target: int) -> list[SlicedPrograms]:
    """Give these programs, those with the same kinds of cuts together."""
    if captured.numerics is None or not captured.numerics.allows(Numerics.ROUNDING):
        return []
    lists = _lists_of_kinds(captured)
    numbers = {kind: _numbers(captured, kind, target) for kind in dict.fromkeys(sum(lists, ()))}
    by_kinds: dict[tuple[int, ...], dict[tuple[tuple[int, int], ...], None]] = {}
    for listed, level in itertools.product(lists, range(len(_SHARES))):
        sliced = tuple((kind, number) for kind in listed if (number := numbers[kind][level]) > 1)
        if sliced:
            by_kinds.setdefault(tuple(kind for kind, _ in sliced), {})[sliced] = None
    groups = []
    for each, (kinds, chosen) in itertools.product(_by_groups(captured), by_kinds.items()):
        levels = [
            tuple(zip(kinds, level, strict=True))
            for level in zip(*(numbers[kind] for kind in kinds), strict=True)
        ]
        programs = {level: each.in_slices(level) for level in dict.fromkeys(levels)}
        relaxed = _least_of([program.graph for program in programs.values()])
        groups.append(SlicedPrograms(tuple(programs[sliced] for sliced in chosen), relaxed))
    return groups


def _by_groups(captured: Capture) -> list[Capture]:
    """List a capture as it is and, if it has groups, with such as give values out again."""
    again = captured.giving_again()
    return [captured] if again is captured else [captured, again]


def _lists_of_kinds(captured: Capture) -> list[tuple[int, ...]]:
    """List which kinds of cuts are planned together: the first one, two and so on.

    If some of them can make their gradients in the forward, so they are in another list.
    """
    again, in_forward = [], dict[int, int]()
    for kind, cuts in enumerate(captured.cuts):
        if cuts[0].unit is None:
            again.append(kind)
        else:
            in_forward[next(k for k in again if captured.cuts[k][0].ops == cuts[0].ops)] = kind
    first = [tuple(again[:count]) for count in range(1, len(again) + 1)]
    other = (tuple(in_forward.get(kind, kind) for kind in kinds) for kinds in first)
    return list(dict.fromkeys((*first, *other)))


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
    sliced = with_finest_slices(offered)
    if sliced is None:
        return
    try:
        solve_for(sliced.graph)
        note_reach(error, error.budget_bytes)
    except BudgetTooSmall as still:
        note_reach(error, still.smallest_bytes)


def note_reach(error: BudgetTooSmall, reach: int) -> None:
    """Add to a refusal that so many bytes are enough in slices, if that is less."""
    if reach < error.smallest_bytes:
        error.add_note(
            f"With numerics='rounding' the largest values are made in slices, in another order of "
            f"sums: then about {mib(reach)} are enough."
        )


def with_finest_slices(captured: Capture) -> Capture | None:
    """Cut all that can be, as fine as that lowers what is needed; `None` if nothing can be cut.

    By estimates: nobody waits for a refusal until slices are measured.
    """
    if not captured.cuts:
        return None
    plain = captured.without_alternatives().costed("estimate")
    able = plain.with_alternatives(Numerics.ROUNDING, laid_out=())
    kinds = [kind for kind, cuts in enumerate(able.cuts) if cuts[0].unit is None]
    return able.in_slices([(kind, _finest(able, kind, 0)) for kind in kinds])


def _numbers(captured: Capture, kind: int, target: int) -> tuple[int, ...]:
    """List the numbers of slices that a kind of cut is planned in: the finest, and coarser ones."""
    finest = _finest(captured, kind, target)
    return tuple(max(1, finest // share) for share in _SHARES)


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
