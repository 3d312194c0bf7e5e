"""Which groups are worth compiling, by what they take and what their ops take one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from remat_graph.torch.fusing.groups import find_groups
from remat_graph.torch.fusing.missing import raise_missing
from remat_graph.torch.fusing.norms import norms_apart
from remat_graph.torch.fusing.program import fused, name_of
from remat_graph.torch.program import Program

__all__ = ["ops_left_out"]

logger = logging.getLogger(__name__)

_ROUNDS = 3  # without the groups left out, others are made, which may be slower in turn


def ops_left_out(
    program: Program,
    times_of: Callable[[Program], Mapping[str, float]],
    left_out: frozenset[str] = frozenset(),
) -> frozenset[str]:
    """Find the ops of a program without alternatives that are better left out of groups.

    `times_of` gives the seconds of each op of a program, those of groups compiled. Some may be
    `left_out` in any case.
    """
    alone = times_of(program)
    for _ in range(_ROUNDS):
        apart, part_of = norms_apart(program, left_out)
        groups = find_groups(apart, left_out)
        times = times_of(fused(apart, groups))
        raise_missing()
        slower = [
            group
            for group in groups
            if group.body.outputs
            and times[name_of(group)] > sum(alone[op] for op in _of_parts(group.runs, part_of))
        ]
        if not slower:
            return left_out
        for group in slower:
            logger.info(
                "not compiled, for it is slower: %s",
                ", ".join(str(c.target) for c in group.body.calls),
            )
        left_out = left_out.union(*(_of_parts(group.ops, part_of) for group in slower))
    return left_out


def _of_parts(ops: Iterable[str], part_of: Mapping[str, str]) -> set[str]:
    """Name the ops of a program that these are, or are parts of."""
    return {part_of.get(op, op) for op in ops}
