"""Options for the stages of chains: each stage planned as a block of its own, each kind once.

Zhao et al., "Rockmate: an Efficient, Fast, Automatic and Generic Tool for Re-materialization in
PyTorch" (ICML 2023): every block is planned at several budgets by rk-checkmate, identical blocks
once. A stage is cut out with both halves and closed; it is planned as a block without smaller ones
(`blocks.bottom_up`, with the targets of `blocks.targets`). Independent kinds of stages go through
the executor. Stages that several chains share are planned once.
Limits: inputs count as held while a stage is planned, whoever holds them, so what keeping one for
the backward costs is for the programme of the chain to see. Stages of one forward op are left
alone: to compute it again is a move of that programme. So are stages of more than 300 ops, which
rk-checkmate would take too long for.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Any

from remat_graph import Subgraph, block_hash, cut_out
from remat_solvers.chains.chain import Chain, ChainStage
from remat_solvers.chains.costs import Halves
from remat_solvers.core.parallel import run_all
from remat_solvers.core.wiring import Wiring
from remat_solvers.published.hierarchical.blocks.bottom_up import Planner, plan_block
from remat_solvers.published.hierarchical.blocks.options import BlockOption, choose

__all__ = ["StagePlans"]

_LEAST_SECONDS = 0.05
_MOST_OPS = 300


class StagePlans:
    """What is known of the stages of chains: up to `most_options` schedules for each."""

    def __init__(
        self, wiring: Wiring, planner: Planner, most_options: int, executor: Executor | None
    ) -> None:
        self._wiring = wiring
        self._planner = planner
        self._most_options = most_options
        self._executor = executor
        self._kinds: dict[str, tuple[BlockOption, ...]] = {}

    def of(self, chain: Chain, seconds: float) -> list[tuple[Halves, ...]]:
        """Plan the stages that are new, and list the schedules of every stage.

        The time is shared out among the kinds of stages in proportion to their ops.
        """
        new: dict[str, Subgraph] = {}
        kinds = []
        for stage in chain.stages:
            kind = None
            ops = _positions(stage)
            if len(stage.forward) > 1 and stage.backward and len(ops) <= _MOST_OPS:
                subgraph = cut_out(self._wiring.graph, ops)
                kind = block_hash(subgraph)
                if kind not in self._kinds:
                    new.setdefault(kind, subgraph)
            kinds.append(kind)
        total = sum(len(subgraph.graph.ops) for subgraph in new.values())
        tasks: list[tuple[str, tuple[Any, ...]]] = []
        for subgraph in new.values():
            first, count = subgraph.graph.ops[0], len(subgraph.graph.ops)
            share = max(_LEAST_SECONDS, seconds * count / total)
            tasks.append((f"stage from {first.name}", (self._planner, subgraph, (), [], share)))
        planned = run_all(self._executor, plan_block, tasks)
        for kind, options in zip(new, planned, strict=True):
            self._kinds[kind] = choose(options, self._most_options)
        return [
            () if kind is None else _translated(self._kinds[kind], stage)
            for kind, stage in zip(kinds, chain.stages, strict=True)
        ]


def _positions(stage: ChainStage) -> tuple[int, ...]:
    """List the ops of a stage as they are numbered in its subgraph."""
    return tuple(sorted((*stage.forward, *stage.backward)))


def _translated(options: Iterable[BlockOption], stage: ChainStage) -> tuple[Halves, ...]:
    ops = _positions(stage)
    return tuple(
        (tuple(ops[i] for i in option.forward), tuple(ops[i] for i in option.backward))
        for option in options
    )
