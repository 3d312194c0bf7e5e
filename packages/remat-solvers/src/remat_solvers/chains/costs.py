"""What each stage of a chain costs in every way that the dynamic programme may run it.

Every figure is that of running the ops of a stage one by one, a value given up right after its last
use unless the way of running keeps it: workspace and inner values count. A forward stage is run

- *forgetting* (Fn): the input may go, only the carried value stays;
- *keeping* (Fck): as before, but the input stays; it is counted outside;
- *recording* (Fe): what its backward reads stays as well; the input is counted outside;
- *recording and freeing*: as before, but the input goes after its last use, which may be in the
  backward.

Recording has options: each is a schedule of the two halves of the stage. Storing everything inside
is the first one, and rotor's only one (Beaumont et al. 2019); in the others, which rk-rotor adds
(Zhao et al. 2023), the backward half computes some of the forward ops again. Then the input of the
stage is there until the backward where that, or what it computes again, reads it. What is held from
its first computation to its last use is never computed again for its own sake.

The first run of a stage runs all of its ops; a later one those that lead to what is kept, which for
a recording right before the backward need not include the carried value (the third of a record).
Guarantee: no figure is below that of the trace of the same ops.
Complexity: linear in the ops and values of the graph and of the options, but for sums over live
backward values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from remat_solvers.chains.chain import Chain
from remat_solvers.core.dead_runs import live_runs
from remat_solvers.core.wiring import Wiring

__all__ = ["Halves", "Record", "Run", "StageCosts", "measure_stages"]

# A schedule of a stage: the ops of the forward half, and those of the backward half, in order.
Halves = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Run:
    """A way of running a stage: its ops, their time, and the most bytes held meanwhile.

    For a forward run the bytes are those of the stage; what is held around it comes on top.
    """

    ops: tuple[int, ...]
    time: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """An option: how a stage records, and its backward after that.

    Of forward runs there are the first, the later ones, and the last before the backward. The peaks
    of a backward run include all that is alive, but for the input of the stage; those of the
    `..._freeing` runs include the input. `freed_bytes` is the input, if the backward does not read
    it; `rereads` says whether the backward reads the carried value that was recorded.
    """

    forward: tuple[Run, Run, Run]
    backward: Run
    forward_freeing: tuple[Run, Run, Run]
    backward_freeing: Run
    recorded_bytes: int
    freed_bytes: int
    rereads: bool


@dataclass(frozen=True, slots=True)
class StageCosts:
    """All ways of running one stage, and the bytes around them.

    `forget` and `keep` are the first run and the later ones; `records` starts with storing
    everything. `base_first_bytes` is held when the stage runs for the first time, `base_bytes` once
    the stages after it have run backward: gradients, results, held values.
    """

    forget: tuple[Run, Run]
    keep: tuple[Run, Run]
    records: tuple[Record, ...]
    input_bytes: int
    carried_bytes: int
    base_first_bytes: int
    base_bytes: int


def measure_stages(
    wiring: Wiring, chain: Chain, options: Sequence[Iterable[Halves]] | None = None
) -> tuple[StageCosts, ...]:
    """Work out the costs of every stage; `options` are those besides storing everything."""
    lives = _Lives(wiring, chain)
    costs: list[StageCosts] = []
    before: set[int] = set()
    source: int | None = None
    for k, stage in enumerate(chain.stages):
        border = _Border(
            wiring=wiring,
            forward=stage.forward,
            backward=stage.backward,
            inputs=_only(source, chain.held),
            carried=_only(stage.carried, chain.held),
            held=chain.held,
            before=frozenset(before),
            around=frozenset(lives.into(k)),
            after=frozenset(lives.into(k - 1)),
        )
        halves = [(stage.forward, stage.backward), *(options[k] if options else ())]
        costs.append(
            StageCosts(
                forget=border.passing(border.inputs),
                keep=border.passing(()),
                records=tuple(dict.fromkeys(border.record(*pair) for pair in halves)),
                input_bytes=_bytes(wiring, border.inputs),
                carried_bytes=_bytes(wiring, border.carried),
                base_first_bytes=_bytes(wiring, before),
                base_bytes=_bytes(wiring, border.around),
            )
        )
        before |= border.here
        source = stage.carried
    return tuple(costs)


def _only(value: int | None, held: frozenset[int]) -> frozenset[int]:
    return frozenset() if value is None or value in held else frozenset({value})


@dataclass(frozen=True, slots=True)
class _Border:
    """A stage and what it meets: `before` is held when it runs first; for the others see `_Lives`.

    `inputs` and `carried` have at most one value, and none that is held.
    """

    wiring: Wiring
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    inputs: frozenset[int]
    carried: frozenset[int]
    held: frozenset[int]
    before: frozenset[int]
    around: frozenset[int]
    after: frozenset[int]

    @property
    def outputs(self) -> frozenset[int]:
        """What the forward half makes."""
        return frozenset(v for op in self.forward for v in self.wiring.outputs[op])

    @property
    def here(self) -> frozenset[int]:
        """What the first run leaves to be held."""
        return self.outputs & self.held

    def passing(self, start: frozenset[int] | tuple[()]) -> tuple[Run, Run]:
        """Measure the runs that leave the carried value alone."""
        again, _ = self._leading(self.forward, self.carried)
        return (
            _run(self.wiring, self.forward, start, self.carried | self.here, self.before),
            _run(self.wiring, again, start, self.carried, self.held),
        )

    def record(self, forward: tuple[int, ...], backward: tuple[int, ...]) -> Record:
        """Measure an option."""
        wiring = self.wiring
        backward, needed = self._leading(backward, self.after, self.backward)
        saved = needed & self.outputs
        kept = self.carried | saved
        reread = self.inputs & {v for op in backward for v in wiring.inputs[op]}
        runs = [
            (self._leading(forward, kept, self.forward)[0], kept | self.here, self.before),
            (self._leading(forward, kept)[0], kept, self.held),
            (self._leading(forward, saved)[0], saved, self.held),
        ]
        start = saved | self.around

        def ahead(there: frozenset[int], stays: frozenset[int]) -> tuple[Run, Run, Run]:
            first, later, last = (
                _run(wiring, ops, there, keep | stays, outside) for ops, keep, outside in runs
            )
            return first, later, last

        return Record(
            forward=ahead(frozenset(), frozenset()),
            backward=_run(wiring, backward, start, self.after, self.inputs),
            forward_freeing=ahead(self.inputs, reread),
            backward_freeing=_run(wiring, backward, start | reread, self.after, ()),
            recorded_bytes=_bytes(wiring, kept),
            freed_bytes=_bytes(wiring, self.inputs - reread),
            rereads=bool(self.carried & saved),
        )

    def _leading(
        self, ops: Sequence[int], wanted: Iterable[int], once: Collection[int] = ()
    ) -> tuple[tuple[int, ...], frozenset[int]]:
        """List the ops that lead to values, and what they read that must be there before.

        Of ops in `once` the first computation stays. Inputs and held values are there anyway.
        """
        first = {op: i for i, op in reversed(list(enumerate(ops))) if op in once}
        there = self.held | self.inputs
        return live_runs(self.wiring, ops, wanted, frozenset(first.values()), there)


class _Lives:
    """Which held and backward values are alive when a stage is the next to run backward."""

    def __init__(self, wiring: Wiring, chain: Chain) -> None:
        self._results = set(wiring.results.tolist())
        home: dict[int, int] = {}
        for k, stage in enumerate(chain.stages):
            home.update(dict.fromkeys((*stage.forward, *stage.backward), k))
        backward = {op for stage in chain.stages for op in stage.backward}
        never = len(chain.stages)
        self._since: dict[int, int] = {}
        self._last: dict[int, int] = {}
        for v, op in enumerate(wiring.producer_list):
            if v in chain.held or op in backward:
                self._since[v] = home[op] if op in backward else never
                self._last[v] = -1 if v in self._results else never
        for op, row in enumerate(wiring.inputs):
            for v in row:
                if v in self._last:
                    self._last[v] = min(self._last[v], home[op])

    def into(self, stage: int) -> set[int]:
        """Collect what is alive when stages beyond `stage` have run backward and it has not."""
        return {v for v, since in self._since.items() if since > stage and self._last[v] <= stage}


def _run(
    wiring: Wiring,
    ops: Sequence[int],
    start: Iterable[int],
    keep: Iterable[int],
    outside: Iterable[int],
) -> Run:
    """Follow a run: `start` is alive before, `keep` after it, `outside` is counted elsewhere.

    A value goes after its last use before it is made again; what starts alive and is not used goes
    before the run.
    """
    live = set(keep)
    born: list[list[int]] = [[] for _ in ops]
    leaving: list[list[int]] = [[] for _ in ops]
    for i in reversed(range(len(ops))):
        for v in wiring.outputs[ops[i]]:
            if v in live:
                born[i].append(v)
                live.remove(v)
        for v in wiring.inputs[ops[i]]:
            if v not in live:
                leaving[i].append(v)
                live.add(v)
    elsewhere = set(outside)
    alive = live.intersection(start)
    held = peak = _bytes(wiring, alive)
    for i, op in enumerate(ops):
        peak = max(peak, held + wiring.output_bytes[op] + wiring.workspace_list[op])
        fresh = [v for v in born[i] if v not in elsewhere]
        alive.update(fresh)
        held += _bytes(wiring, fresh)
        gone = [v for v in leaving[i] if v in alive]
        alive.difference_update(gone)
        held -= _bytes(wiring, gone)
    return Run(tuple(ops), math.fsum(wiring.time_list[op] for op in ops), peak)


def _bytes(wiring: Wiring, values: Iterable[int]) -> int:
    return sum(int(wiring.size[v]) for v in values)
