"""From the program of a module with few of its repeated blocks to that with all of them.

A program was traced with two periods at each end of a row of blocks that do the same (`repeats`):
A, B, C and D. Its calls for C are those for B so many places later, in the backward half so many
places earlier, and read what stands at the same place: of B where those of B read of A, and so on.
If every call of B and C is so, and what comes out of nothing else between them depends on how many
there are, the program with more periods between B and C has copies of B's calls in between. This is
the step from one number of periods to the next; `repeats` says that the forward does the same in
every period. Where it does not hold, `Irregular` is raised, and the whole is traced.

`periods` finds the calls of each. Linear time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from remat_graph.provenance import Provenance
from remat_graph.torch.program import Call, Program
from remat_graph.torch.repeats.blocks import Repeat
from remat_graph.torch.repeats.periods import (
    A,
    B,
    C,
    D,
    Irregular,
    Label,
    Periods,
    Place,
    constants_of,
)

__all__ = ["unroll"]

_READERS = {B: A, C: D}  # beside B and C themselves


def unroll(program: Program, repeats: Iterable[Repeat]) -> Program:
    """Put in the calls of the blocks that were passed over.

    Raises:
        Irregular: if the program does not say what they would be.
    """
    for repeat in repeats:
        program = _Unrolling(Periods(program, repeat)).unrolled()
    return program


@dataclass(frozen=True, slots=True)
class _Read:
    """Something that B and C read alike: what stands at a place, periods later than their own.

    Without a place it is the same in all periods.
    """

    place: Place | None
    later: int = 0


class _Unrolling:
    """One row of blocks put into a program."""

    def __init__(self, periods: Periods) -> None:
        self.periods, self.program = periods, periods.program
        self.last = len(periods.repeat.blocks) - 1
        self.between = range(2, self.last - 1)
        self.kept = {0: A, 1: B, self.last - 1: C, self.last: D}
        self.there = {label: variable for variable, label in periods.labels.items()}
        self.op_there = {label: op for op, label in periods.op_labels.items()}
        self.copies: dict[Label, str] = {}
        self.op_copies: dict[Label, str] = {}
        self.calls = dict(self.program.calls)
        self.views = dict(self.program.views)
        self.storage = dict(self.program.storage)
        self.facts = dict(self.program.facts)
        self.gradients = dict(self.program.gradients)
        self.twins = dict(self.program.twins)
        self.equivalence = dict(self.program.equivalence)
        self.provenance = dict(self.program.provenance)
        self.viewed = {
            (periods.root(name), periods.chain(name)): name for name in self.program.views
        }
        self.taken = {*self.storage, *self.program.order, *self.program.constants}
        self.moved_from: dict[tuple[Provenance, int, int], Provenance] = {}

    def unrolled(self) -> Program:
        """Give the program with all periods."""
        program = self.program
        self._check_others()
        for mine, _ in self.periods.pairs:
            for period in self.between:
                self._name(mine, period)
        for mine, its in self.periods.pairs:
            self._store(mine, its)
        for mine, its in self.periods.pairs:
            self._unroll(mine, its)
        self._unroll_gradients()
        order = tuple(self._ordered())
        copies = {
            (half, self.op_copies[period, (half, at)]) for period, (half, at) in self.op_copies
        }
        return replace(
            program,
            calls={op: self.calls[op] for op in order if op in self.calls},
            views=self.views,
            order=order,
            storage=self.storage,
            facts=self.facts,
            gradients={
                item.variable: self.gradients[item.variable]
                for item in program.inputs
                if item.variable in self.gradients
            },
            backward_ops=program.backward_ops | {op for half, op in copies if half == "backward"},
            twins=self.twins,
            equivalence=self.equivalence,
            provenance=self.provenance,
        )

    def _check_others(self) -> None:
        """Check that nothing but the periods beside them reads what B and C make."""
        program, labels = self.program, self.periods.labels
        for op, call in program.calls.items():
            period, _ = self.periods.op_labels.get(op, (None, None))
            if period in (B, C):
                continue
            read = {self._period_of(name) for name in call.reads}
            twin = program.twins.get(op)
            if twin is not None:
                read.add(self.periods.op_labels.get(twin, (None,))[0])
            if any(_READERS[result] != period for result in (B, C) if result in read):
                raise Irregular(f"{op} depends on a block")
        for variable, gradient in program.gradients.items():
            result = self._period_of(gradient)
            period, _ = labels.get(variable, (None, None))
            if result in _READERS and period not in (B, C, _READERS[result]):
                raise Irregular(f"the gradient of {variable} is made in a block")
        held = (
            *program.returned,
            *(name for output in program.outputs for name in (output.variable, output.base)),
            *(name for write in program.writes.values() for name in (write.target, write.variable)),
        )
        if any(self._period_of(name) in _READERS for name in held):
            raise Irregular("what a block makes is handed over or written")

    def _period_of(self, variable: str) -> int | None:
        return self.periods.labels.get(self.periods.root(variable), (None, None))[0]

    def _name(self, op: str, period: int) -> None:
        label = self.periods.op_labels
        for result in self.program.calls[op].results:
            if result is not None:
                self.copies[period, self.periods.labels[result][1]] = self._fresh(result, period)
        results = self.program.calls[op].results
        self.op_copies[period, label[op][1]] = (
            self.copies[period, self.periods.labels[op][1]]
            if op in results
            else self._fresh(op, period)
        )

    def _fresh(self, like: str, period: int) -> str:
        """Find a name that is the same whatever else is in the program, as in its variants."""
        name = f"{like}_{period}"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def _store(self, mine: str, its: str) -> None:
        """Say of what the copies of an op of B make what is known before."""
        program = self.program
        ours, theirs = program.calls[mine].results, program.calls[its].results
        for variable, counterpart in zip(ours, theirs, strict=True):
            if variable is None or counterpart is None:
                continue
            stored = self._alike(program.storage[variable], program.storage[counterpart])
            if stored.place is None:
                raise Irregular(f"{variable} is not made by {mine}")
            for period in self.between:
                name = self.copies[period, self.periods.labels[variable][1]]
                self.facts[name] = program.facts[variable]
                self.storage[name] = self._variable(period + stored.later, stored.place)

    def _unroll(self, mine: str, its: str) -> None:
        """Copy an op of B for each period between; B's and C's own read of their new neighbours."""
        program, place = self.program, self.periods.op_labels[mine][1]
        b, c = program.calls[mine], program.calls[its]
        reads = self._compared(b, c)
        replays = None
        if b.replay is not None and c.replay is not None:
            replays = self._compared(b.replay, c.replay)
        twins = program.twins.get(mine), program.twins.get(its)
        twin = None
        if twins[0] is not None and twins[1] is not None:
            twin = self._alike(twins[0], twins[1], self.periods.op_labels)
        if (
            (b.replay is None) != (c.replay is None)
            or (twins[0] is None) != (twins[1] is None)
            or program.equivalence[mine] != program.equivalence[its]
        ):
            raise Irregular(f"{mine} and {its} are different calls")
        for period in (1, *self.between, self.last - 1):
            op = self._op(period, place)
            like, original = (c, its) if period == self.last - 1 else (b, mine)
            names = {
                result: self._variable(period, self.periods.labels[result][1])
                for result in like.results
                if result is not None
            }
            replay = like.replay
            if replay is not None and replays is not None:
                replay = self._moved(replay, replays, period, names)
            moved = self._moved(like, reads, period, names)
            self.calls[op] = moved if replay is None else replace(moved, replay=replay)
            if twin is not None:
                self.twins[op] = (
                    program.twins[original]
                    if twin.place is None
                    else self._op(period + twin.later, twin.place)
                )
            if original in program.provenance:
                traced = C if like is c else B
                self.provenance[op] = self._from(program.provenance[original], traced, period)
            if period in self.between:
                self.equivalence[op] = program.equivalence[mine]

    def _compared(self, b: Call, c: Call) -> list[_Read]:
        """Check that B and C call the same, and say what of."""
        facts = self.program.facts
        if (
            (b.target, b.sequence, b.random, b.workspace_bytes, b.body)
            != (c.target, c.sequence, c.random, c.workspace_bytes, c.body)
            or constants_of(b) != constants_of(c)
            or [None if result is None else facts[result] for result in b.results]
            != [None if result is None else facts[result] for result in c.results]
        ):
            raise Irregular(f"{b.name} and {c.name} are different calls")
        pairs = zip(b.variables, c.variables, strict=True)
        same = []
        for mine, its in pairs:
            if self.periods.chain(mine) != self.periods.chain(its):
                raise Irregular(f"{mine} and {its} are different views")
            same.append(self._alike(self.periods.root(mine), self.periods.root(its)))
        return same

    def _alike(self, mine: str, its: str, labels: Mapping[str, Label] | None = None) -> _Read:
        """Compare what B reads with what C reads in its place."""
        labels = self.periods.labels if labels is None else labels
        here, there = labels.get(mine), labels.get(its)
        if here is not None and there is not None and there == (here[0] + 1, here[1]):
            return _Read(here[1], here[0] - B)
        if mine == its and (here is None or here[0] not in (B, C)):
            return _Read(None)
        raise Irregular(f"{mine} and {its} are not at the same place")

    def _moved(
        self, call: Call, reads: Sequence[_Read], period: int, names: Mapping[str, str]
    ) -> Call:
        """Give a call of B or C as of another period."""
        moved = [
            variable
            if read.place is None
            else self._view(variable, period + read.later, read.place)
            for variable, read in zip(call.variables, reads, strict=True)
        ]
        return call.of(
            moved, tuple(None if result is None else names[result] for result in call.results)
        )

    def _view(self, like: str, period: int, place: Place) -> str:
        """Find, or make, the view of what stands at a place in a period that is made like one."""
        root = self._variable(period, place)
        if like not in self.program.views:
            return root
        key = root, self.periods.chain(like)
        if key not in self.viewed:
            base = self._view(self.periods.base(like), period, place)
            name = self._fresh(like, period)
            view = self.program.views[like]
            results = tuple(name if result == like else None for result in view.results)
            self.views[name] = view.of([base] * len(view.variables), results)
            self.facts[name] = self.program.facts[like]
            self.storage[name] = self.storage[root]
            self.viewed[key] = name
        return self.viewed[key]

    def _variable(self, period: int, place: Place) -> str:
        """Name what stands at a place, of all periods."""
        if place[0] == "own" and 0 <= period <= self.last:
            return self.periods.own[period][place[1]]
        return self._find(self.there, self.copies, period, place)

    def _op(self, period: int, place: Place) -> str:
        return self._find(self.op_there, self.op_copies, period, place)

    def _find(
        self,
        traced: Mapping[Label, str],
        copies: Mapping[Label, str],
        period: int,
        place: Place,
    ) -> str:
        kept = self.kept.get(period)
        name = copies.get((period, place)) if kept is None else traced.get((kept, place))
        if name is None:
            raise Irregular(f"period {period} has nothing at {place}")
        return name

    def _unroll_gradients(self) -> None:
        gradients = self.program.gradients
        for position, (mine, its) in enumerate(
            zip(self.periods.own[1], self.periods.own[self.last - 1], strict=True)
        ):
            if (mine in gradients) != (its in gradients):
                raise Irregular(f"{mine} and {its} are not both differentiated")
            if mine not in gradients:
                continue
            b, c = gradients[mine], gradients[its]
            read = self._alike(self.periods.root(b), self.periods.root(c))
            if read.place is None or self.periods.chain(b) != self.periods.chain(c):
                raise Irregular(f"{b} and {c} are not gradients of one block each")
            for period in (1, *self.between, self.last - 1):
                own = self.periods.own[period][position]
                self.gradients[own] = self._view(b, period + read.later, read.place)

    def _from(self, provenance: Provenance, traced: int, period: int) -> Provenance:
        """Say where an op comes from as of another period than it was traced in."""
        key = provenance, traced, period
        if key not in self.moved_from:
            self.moved_from[key] = self._find_from(*key)
        return self.moved_from[key]

    def _find_from(self, provenance: Provenance, traced: int, period: int) -> Provenance:
        """Find the block of another period; a section may reach into those beside it."""
        repeat = self.periods.repeat
        for block, index in enumerate(repeat.kept):
            there = period + block - traced
            for position, name in enumerate(repeat.blocks[index]):
                inside = provenance.module.removeprefix(name)
                if (
                    provenance.module.startswith(name)
                    and inside[:1] in ("", ".")
                    and 0 <= there <= self.last
                ):
                    return replace(provenance, module=repeat.blocks[there][position] + inside)
        return provenance

    def _ordered(self) -> Iterator[str]:
        forward = [pair for pair in self.periods.pairs if pair[0] not in self.program.backward_ops]
        backward = self.periods.pairs[len(forward) :]
        ends = {forward[-1][0]: (forward, self.between)}
        if backward:
            ends[backward[-1][1]] = (backward, self.between[::-1])
        for op in self.program.order:
            yield op
            pairs, periods = ends.get(op, ((), ()))
            for period in periods:
                for mine, _ in pairs:
                    yield self.op_copies[period, self.periods.op_labels[mine][1]]
