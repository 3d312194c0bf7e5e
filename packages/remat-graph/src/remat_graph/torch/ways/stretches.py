"""Stretches: convex sets of ops that can run slice by slice along one axis.

From one variable and one of its axes, placements are followed to its readers and its maker, and on
from there, for as long as an operator's rule (`operators.placements`) fits what is known. What is
read or made inside has one place, on which all that is inside agrees. Nothing outside may stand
between two ops of a stretch: what lies between is taken in, or the op beyond it stays out.

A stretch is grown greedily, so it depends on where it is grown from; no op beside it can be added
(`Stretch.ends` says why not).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from remat_graph.torch.calls import Body, Call
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.operators import placements
from remat_graph.torch.program import LOSS, Program
from remat_graph.torch.recomputing import may_run_again
from remat_graph.torch.slices.placement import Place, Placement, Sliced, Summed, Whole
from remat_graph.torch.ways.flow import Flow, union
from remat_graph.torch.ways.slice_by_slice import SlicedBody

__all__ = ["Stretch", "Stretches", "stretch_from"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Ops that can run slice by slice, and the views between them.

    `ops` are in the order of the program. `again` are those of them that run for this stretch
    alone: others read what they made elsewhere. `places` says where each variable stands that is
    read or made inside. `body` is what runs: it reads what comes from outside, and gives what ops
    inside make and something outside reads. `ends` says of each op beside the stretch why it is
    outside; views have the name of the first variable that they make.
    """

    ops: tuple[str, ...]
    again: frozenset[str]
    places: Mapping[str, Place]
    body: SlicedBody
    ends: Mapping[str, str]

    @property
    def own(self) -> tuple[str, ...]:
        """The ops that run inside and nowhere else."""
        return tuple(op for op in self.ops if op not in self.again)


def stretch_from(
    program: Program,
    seed: str,
    place: Sliced,
    *,
    units: int | None = None,
    ops: Collection[str] | None = None,
    again: Collection[str] = (),
) -> Stretch:
    """Grow a stretch from a variable that is sliced along an axis, or several as one.

    `units` is how many equal parts everything sliced can be cut into: the length of the axis,
    unless given. Fewer let in ops that look at several rows at once: with the batch in place of all
    tokens, attention. `ops` are those that may be inside: of one half; if not given, that in which
    the variable is made, or the backward if `again` is given. Ops in `again`, of the forward half,
    may run once more inside, for what backward ops read of them.

    Raises:
        CaptureError: if there is no such variable or axis, the units do not divide its length, or
            an op in `again` may not run twice.
    """
    return Stretches(program).grow(seed, place, units=units, ops=ops, again=again)


class Stretches:
    """Grows stretches of one program: what leads to what, and the rules of its calls, once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._flow = Flow(program)
        self._rules: dict[str, tuple[Placement, ...]] = {}

    def between(self, ops: Collection[str]) -> frozenset[str]:
        """Name the ops that lead from one of these to another, and these."""
        behind = union(self._flow.behind[op] for op in ops)
        before = union(self._flow.before[op] for op in ops)
        return frozenset(self._program.calls.keys() & self._flow.named(behind & before))

    def grow(
        self,
        seed: str,
        place: Sliced,
        *,
        units: int | None = None,
        ops: Collection[str] | None = None,
        again: Collection[str] = (),
    ) -> Stretch:
        """Grow one, as `stretch_from` does.

        Raises:
            CaptureError: as that does.
        """
        program = self._program
        facts = program.facts.get(seed)
        if facts is None or not 0 <= place.first <= place.axis < len(facts.shape):
            raise CaptureError(f"the program has no tensor {seed!r} that could be {place}")
        while place.joined and facts.shape[place.first] == 1:
            place = replace(place, joined=place.joined - 1)
        length = place.length(facts.shape)
        units = length if units is None else units
        if units < 1 or length % units:
            raise CaptureError(
                f"{seed!r}, {place}, has {length} rows, which are no {units} equal parts"
            )
        for op in again:
            call = program.calls[op]
            if (
                op in program.backward_ops
                or call.random
                or not may_run_again(call.target, call.body)
            ):
                raise CaptureError(f"{op} ({call.name}) is not of the forward half, or runs once")
        if ops is None:
            backward = bool(again) or _is_made_in_backward(program, seed)
            ops = [op for op in program.calls if (op in program.backward_ops) == backward]
        own = frozenset(ops) - frozenset(again) - program.alternatives.keys()
        growth = _Growth(program, self._flow, self._rules, units, own, frozenset(again))
        growth.places[seed] = place
        growth.grow(seed)
        return growth.stretch()


def _is_made_in_backward(program: Program, variable: str) -> bool:
    computed = {program.storage[name] for name in program.tangents}
    for op in program.backward_ops & program.calls.keys():
        computed.update(
            program.storage[name] for name in program.calls[op].results if name is not None
        )
    return program.storage[variable] in computed


class _Growth:
    """A stretch while it grows: its steps, and where the variables stand that they touch."""

    def __init__(
        self,
        program: Program,
        flow: Flow,
        rules: dict[str, tuple[Placement, ...]],
        units: int,
        own: frozenset[str],
        again: frozenset[str],
    ) -> None:
        self.program = program
        self.flow = flow
        self.units = units
        self.own = own
        self.again = again
        self._rules = rules
        may_be_inside = (op for op in own | again if op in flow.bit)
        self._closed = flow.ops & ~union(flow.bit[op] for op in may_be_inside)
        self.places: dict[str, Place] = {}
        self.inside: dict[str, Placement] = {}
        self.ends: dict[str, str] = {}
        self._set = self._behind = self._before = 0
        self._ways: dict[str, list[Placement]] = {}

    def grow(self, seed: str) -> None:
        """Take in what is beside the stretch, in order, until nothing more fits."""
        waiting: list[tuple[int, str]] = []
        self._wait_beside([seed], waiting)
        while waiting:
            _, name = heapq.heappop(waiting)
            if name in self.inside or not self._is_beside(name):
                continue
            placed = set(self.places)
            reason = self._take(name)
            if reason is None:
                self._wait_beside(self.places.keys() - placed, waiting)
            else:
                self.ends[name] = reason
        for name in self.inside:
            self.ends.pop(name, None)

    def _wait_beside(self, variables: Iterable[str], waiting: list[tuple[int, str]]) -> None:
        """Have the steps looked at that read or make these variables."""
        for variable in variables:
            makers = [self.flow.maker[variable]] if variable in self.flow.maker else []
            for name in (*makers, *self.flow.readers.get(variable, ())):
                if name not in self.inside:
                    heapq.heappush(waiting, (self.flow.position[name], name))

    def _is_beside(self, name: str) -> bool:
        """Whether it touches something sliced or summed; what runs again, as its maker alone."""
        step = self.flow.steps[name]
        touched = step.results if name in self.again else (*step.reads, *step.results)
        return any(not isinstance(self.places.get(each, _WHOLE), Whole) for each in touched)

    def _take(self, name: str) -> str | None:
        """Take in a step with all that lies between; or say why it cannot be."""
        between = self._behind & self.flow.before[name]
        if name in self.own:
            between |= self.flow.behind[name] & self._before
        between &= ~self._set & ~self.flow.bit[name]
        closed = between & self._closed
        if closed:
            first = self.flow.first(closed)
            return f"{first} lies between: {self._refuses(first)}"
        missing = [*self.flow.named(between), name]
        for each in missing:
            refused = self._refuses(each)
            if refused is not None:
                return refused if each == name else f"{each} lies between: {refused}"
        places = dict(self.places)
        chosen: dict[str, Placement] = {}
        while missing:
            reasons = {}
            for each in missing:
                fitting = self._fit(each, places)
                if isinstance(fitting, Placement):
                    chosen[each] = fitting
                    places.update(_places(self._call(each), fitting) or {})
                else:
                    reasons[each] = fitting
            if len(reasons) == len(missing):
                reason = reasons[missing[0]]
                return reason if missing[0] == name else f"{missing[0]} lies between: {reason}"
            missing = list(reasons)
        self.places = places
        self.inside |= chosen
        for each in chosen:
            self._set |= self.flow.bit[each]
            self._before |= self.flow.before[each]
            if each in self.own:
                self._behind |= self.flow.behind[each]
        return None

    def _call(self, name: str) -> Call:
        call = self.flow.steps[name].call
        assert call is not None, name
        return call

    def _refuses(self, name: str) -> str | None:
        """Give the reason why a step can be in no such stretch, if there is one."""
        call = self.flow.steps[name].call
        if call is None:
            return "it is outside the program" if name == LOSS else "it writes to an input"
        if name in self.program.calls and name not in self.own and name not in self.again:
            return "it is not among the ops that may be inside"
        if call.random is not None:
            return f"{call.name} draws"
        if name not in self._rules:
            self._rules[name] = placements(call, self.program.facts)
        if name not in self._ways:
            self._ways[name] = [
                way
                for way in self._rules[name]
                if not way.is_sliced or way.units(call, self.program.facts) % self.units == 0
            ]
        if not self._ways[name]:
            return f"{call.name} cannot be cut into {self.units} parts along any axis"
        return None

    def _fit(self, name: str, places: Mapping[str, Place]) -> Placement | str:
        """Find the placement of a step that agrees with what is known, or say what has none.

        It must touch something that is sliced or summed; a sum is made inside.
        """
        call = self._call(name)
        fixed = {each: places[each] for each in _variables(call) if each in places}
        touched = {each: place for each, place in fixed.items() if not isinstance(place, Whole)}
        for way in self._ways[name] if touched else ():
            wanted = _places(call, way)
            if wanted is not None and all(
                place == fixed[each]
                if each in fixed
                else each not in call.reads or not isinstance(place, Summed)
                for each, place in wanted.items()
            ):
                return way
        standing = ", ".join(f"{each} {place}" for each, place in fixed.items())
        return f"{call.name} has no rule for {standing or 'what is whole'} ({self.units} parts)"

    def _needed(self) -> list[str]:
        """List the steps inside in order; of views and what runs again, those that are read."""
        needed: list[str] = []
        read: set[str] = set()
        for name in reversed(self.flow.names):
            if name in self.inside:
                step = self.flow.steps[name]
                if name in self.own or not read.isdisjoint(step.results):
                    needed.append(name)
                    read.update(step.reads)
        return needed[::-1]

    def stretch(self) -> Stretch:
        """Give what has grown."""
        names = self._needed()
        steps = [self.flow.steps[name] for name in names]
        results = {each for step in steps for each in step.results}
        inputs = dict.fromkeys(read for step in steps for read in step.reads if read not in results)
        body = Body(tuple(inputs), tuple(map(self._call, names)), tuple(self._outputs(names)))
        touched = {*inputs, *results}
        return Stretch(
            ops=tuple(name for name in names if name in self.program.calls),
            again=self.again.intersection(names),
            places={name: place for name, place in self.places.items() if name in touched},
            body=SlicedBody(
                body,
                tuple(self.inside[name] for name in names),
                self.units,
                {name: self.program.facts[name] for name in (*body.inputs, *results)},
                self._again_in(names),
            ),
            ends=self.ends,
        )

    def _again_in(self, names: Iterable[str]) -> tuple[str, ...]:
        """Name what is made by ops that run again, and by views of what they make."""
        variables: dict[str, None] = {}
        for name in names:
            step = self.flow.steps[name]
            views = name not in self.program.calls
            if name in self.again or (views and variables.keys() >= set(step.reads)):
                variables.update(dict.fromkeys(step.results))
        return tuple(variables)

    def _outputs(self, names: list[str]) -> Iterator[str]:
        """List what own ops make and something outside reads, itself or a view of it."""
        storage = self.program.storage
        inside = set(names)
        gradients = {storage[name] for name in self.program.gradients.values()}
        for name in names:
            for each in self.flow.steps[name].results if name in self.own else ():
                readers = self.flow.leaving.get(storage[each], ())
                if storage[each] in gradients or not inside.issuperset(readers):
                    yield each


_WHOLE = Whole()


def _variables(call: Call) -> tuple[str, ...]:
    """List what a call reads, as often as it does, and makes."""
    return (*call.variables, *(name for name in call.results if name is not None))


def _places(call: Call, way: Placement) -> dict[str, Place] | None:
    """Give the place of each variable in a placement; `None` if one is read in two places."""
    pairs = zip((*call.variables, *call.results), (*way.inputs, *way.outputs), strict=True)
    pairs_by_name = {(name, place) for name, place in pairs if name is not None}
    return dict(pairs_by_name) if len(pairs_by_name) == len(set(_variables(call))) else None
