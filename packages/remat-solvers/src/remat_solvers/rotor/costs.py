"""What each stage of a chain costs in every way that the dynamic programme may run it.

Every figure is that of running the ops of a stage one by one in execution order, a value given up
right after its last use unless the way of running keeps it: workspace and inner values count.
A forward stage is run

- *forgetting* (Fn): the input may go, only the carried value stays;
- *keeping* (Fck): as before, but the input stays; it is counted outside;
- *recording* (Fe): what its backward reads stays as well; the input is counted outside;
- *recording and freeing*: as before, but the input goes, where the backward does not read it.

The first run of a stage runs all of its ops; a later one those that lead to what is kept, which for
a recording right before the backward need not include the carried value (the third of a `record`).
Complexity: linear in the ops and values of the graph, but for sums over live backward values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from remat_solvers.rotor.chain import Chain
from remat_solvers.wiring import Wiring

__all__ = ["Run", "StageCosts", "measure_stages"]


@dataclass(frozen=True, slots=True)
class Run:
    """A way of running a stage: its ops, their time, and the most bytes held meanwhile.

    For a forward run the bytes are those of the stage; what is held around it comes on top.
    """

    ops: tuple[int, ...]
    time: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class StageCosts:
    """All ways of running one stage, and the bytes around them.

    A pair is the first run and the later ones; a triple adds the last before the backward.
    `base_first_bytes` is held when the stage runs for the first time, `base_bytes` once the stages
    after it have run backward: gradients, results, held values. The peak of `backward` includes
    everything but the input of the stage. `freed_bytes` is the input, if the backward does not read
    it; `rereads` says whether the backward reads the carried value.
    """

    forget: tuple[Run, Run]
    keep: tuple[Run, Run]
    record: tuple[Run, Run, Run]
    record_freeing: tuple[Run, Run, Run]
    backward: Run
    carried_bytes: int
    recorded_bytes: int
    freed_bytes: int
    rereads: bool
    base_first_bytes: int
    base_bytes: int


def measure_stages(wiring: Wiring, chain: Chain) -> tuple[StageCosts, ...]:
    """Work out the costs of every stage."""
    lives = _Lives(wiring, chain)
    costs: list[StageCosts] = []
    before: set[int] = set()
    source: int | None = None
    held = chain.held
    for k, stage in enumerate(chain.stages):
        made = {v for op in stage.forward for v in wiring.outputs[op]}
        read = {v for op in stage.backward for v in wiring.inputs[op]}
        here = made & held
        inputs = _only(source, held)
        carried = _only(stage.carried, held)
        saved = (read & made) - held
        kept = carried | saved
        freed = inputs - read
        there = held | inputs
        around, after = lives.into(k), lives.into(k - 1)
        to_carried = _closure(wiring, stage.forward, carried, there)
        to_kept = _closure(wiring, stage.forward, kept, there)
        to_saved = _closure(wiring, stage.forward, saved, there)
        costs.append(
            StageCosts(
                forget=(
                    _run(wiring, stage.forward, inputs, carried | here, before),
                    _run(wiring, to_carried, inputs, carried, held),
                ),
                keep=(
                    _run(wiring, stage.forward, (), carried | here, before),
                    _run(wiring, to_carried, (), carried, held),
                ),
                record=(
                    _run(wiring, stage.forward, (), kept | here, before),
                    _run(wiring, to_kept, (), kept, held),
                    _run(wiring, to_saved, (), saved, held),
                ),
                record_freeing=(
                    _run(wiring, stage.forward, freed, kept | here, before),
                    _run(wiring, to_kept, freed, kept, held),
                    _run(wiring, to_saved, freed, saved, held),
                ),
                backward=_run(wiring, stage.backward, saved | around, after, inputs),
                carried_bytes=_bytes(wiring, carried),
                recorded_bytes=_bytes(wiring, kept),
                freed_bytes=_bytes(wiring, freed),
                rereads=bool(carried & saved),
                base_first_bytes=_bytes(wiring, before),
                base_bytes=_bytes(wiring, around),
            )
        )
        before |= here
        source = stage.carried
    return tuple(costs)


def _only(value: int | None, held: frozenset[int]) -> frozenset[int]:
    return frozenset() if value is None or value in held else frozenset({value})


class _Lives:
    """Which held and backward values are alive when a stage is the next to run backward."""

    def __init__(self, wiring: Wiring, chain: Chain) -> None:
        self._chain = chain
        self._results = set(wiring.results.tolist())
        home: dict[int, int] = {}
        for k, stage in enumerate(chain.stages):
            home.update(dict.fromkeys((*stage.forward, *stage.backward), k))
        backward = {op for stage in chain.stages for op in stage.backward}
        never = len(chain.stages)
        self._made: dict[int, int] = {}
        self._last: dict[int, int] = {}
        for v, op in enumerate(wiring.producer_list):
            if v in chain.held or op in backward:
                self._made[v] = home[op] if op in backward else never
                self._last[v] = -1 if v in self._results else never
        for op, row in enumerate(wiring.inputs):
            for v in row:
                if v in self._last:
                    self._last[v] = min(self._last[v], home[op])

    def into(self, stage: int) -> set[int]:
        """Collect what is alive when stages beyond `stage` have run backward and it has not."""
        return {v for v, made in self._made.items() if made > stage and self._last[v] <= stage}


def _closure(
    wiring: Wiring, ops: tuple[int, ...], wanted: Iterable[int], stops: Iterable[int]
) -> tuple[int, ...]:
    """List the ops of a stage that lead to values, given some that are there."""
    needed, there = set(wanted), set(stops)
    chosen: list[int] = []
    for op in reversed(ops):
        if needed.intersection(wiring.outputs[op]):
            chosen.append(op)
            needed.update(v for v in wiring.inputs[op] if v not in there)
    return tuple(reversed(chosen))


def _run(
    wiring: Wiring,
    ops: tuple[int, ...],
    start: Iterable[int],
    keep: Iterable[int],
    outside: Iterable[int],
) -> Run:
    """Follow a run: `start` is alive before, `keep` after it, `outside` is counted elsewhere.

    What starts alive and is neither read nor kept goes before the run.
    """
    last = {v: i for i, op in enumerate(ops) for v in wiring.inputs[op]}
    stays, elsewhere = set(keep), set(outside)
    alive = {v for v in start if v in last or v in stays}
    leaving: dict[int, list[int]] = {}
    for v, i in last.items():
        if v not in stays:
            leaving.setdefault(i, []).append(v)
    held = peak = _bytes(wiring, alive)
    for i, op in enumerate(ops):
        peak = max(peak, held + wiring.made_list[op] + wiring.workspace_list[op])
        fresh = [v for v in wiring.outputs[op] if v not in elsewhere and v not in alive]
        fresh = [v for v in fresh if v in stays or v in last]
        alive.update(fresh)
        held += _bytes(wiring, fresh)
        gone = [v for v in leaving.get(i, ()) if v in alive]
        alive.difference_update(gone)
        held -= _bytes(wiring, gone)
    return Run(ops, math.fsum(wiring.time_list[op] for op in ops), peak)


def _bytes(wiring: Wiring, values: Iterable[int]) -> int:
    return sum(int(wiring.size[v]) for v in values)
