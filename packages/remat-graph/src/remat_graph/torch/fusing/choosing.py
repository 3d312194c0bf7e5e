"""Which groups are worth compiling, by what they take and what their ops take one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from remat_graph.torch.fusing.groups import find_groups
from remat_graph.torch.fusing.program import fused, name_of
from remat_graph.torch.program import Program

__all__ = ["ops_left_out"]

logger = logging.getLogger(__name__)

_ROUNDS = 3  # without the groups left out, others are made, which may be slower in turn


def ops_left_out(
    program: Program, times_of: Callable[[Program], Mapping[str, float]]
) -> frozenset[str]:
    """Find the ops of a program without alternatives that are better left out of groups.

    `times_of` gives the seconds of each op of a program, those of groups compiled.
    """
    alone = times_of(program)
    left_out: frozenset[str] = frozenset()
    for _ in range(_ROUNDS):
        groups = find_groups(program, left_out)
        times = times_of(fused(program, groups))
        slower = [
            group
            for group in groups
            if group.body.outputs and times[name_of(group)] > sum(alone[op] for op in group.runs)
        ]
        if not slower:
            return left_out
        for group in slower:
            logger.info(
                "not compiled, for it is slower: %s",
                ", ".join(str(c.target) for c in group.body.calls),
            )
        left_out = left_out.union(*(group.ops for group in slower))
    return left_out
