"""A program in which cuts run in slices: each of the two stretches of a cut is one call.

The call stands where the last op of its stretch stood; what reads of it comes behind it. Of the
forward stretch it gives what something else reads: what the backward stretch alone reads is made
again there. Or the forward's makes gradients as well, for a tangent of one: then what it divides by
is one call before it, and each gradient is scaled by one in the backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from remat_graph.torch.calls import Call, Variable
from remat_graph.torch.fusing.kernel import Kernel, run_fused
from remat_graph.torch.kernels.unit_tangent import scaled
from remat_graph.torch.program import Program
from remat_graph.torch.regrouping import values_read, with_groups
from remat_graph.torch.ways.cuts import Cut
from remat_graph.torch.ways.slice_by_slice import SlicedBody, numbered

__all__ = [
    "body_of",
    "bytes_of_cut",
    "chosen_cuts",
    "in_slices",
    "read_as_traced",
    "run_in_slices",
    "same_cuts",
]


def run_in_slices(body: SlicedBody, slices: int, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Run a body in so many slices, of as equal sizes as can be."""
    return body.run(inputs, body.bounds(slices))


def body_of(call: Call) -> SlicedBody | Kernel | None:
    """Give what a call stands for: what runs slice by slice, or the kernel of a group."""
    if call.target in (run_in_slices, run_fused):
        return call.args[0]  # type: ignore[no-any-return]
    return call.args[2] if call.target is scaled else None


def read_as_traced(call: Call) -> tuple[str, ...]:
    """List what a call reads as it was traced, not for calls that run again in it."""
    if call.target is run_in_slices:
        first, (body, _, *inputs) = (), call.args
    elif call.target is scaled:
        first, (body, _, *inputs) = call.args[:2], call.args[2:]
    elif call.target is run_fused:
        first, (body, *inputs) = (), call.args
    else:
        return call.reads
    pairs = zip(inputs, body.body.inputs, strict=True)
    traced = (variable for variable, name in pairs if name in body.read_as_traced)
    return tuple(variable.name for variable in (*first, *traced))


def chosen_cuts(
    kinds: Sequence[Sequence[Cut]], sliced: Iterable[tuple[int, int]]
) -> list[tuple[Cut, int]]:
    """List the cuts of these kinds, by position, each with the number of slices it can have.

    A cut is left out if another one before it has one of its ops.
    """
    chosen: list[tuple[Cut, int]] = []
    taken: set[str] = set()
    for kind, slices in sliced:
        for cuts in kinds[kind : kind + 1]:  # for other gradients there may be fewer
            chosen += [(c, min(slices, c.units)) for c in cuts if taken.isdisjoint(c.ops)]
            taken.update(op for cut in cuts for op in cut.ops)
    return chosen


def same_cuts(
    kinds: Sequence[Sequence[Cut]],
    sliced: Iterable[tuple[int, int]],
    others: Sequence[Sequence[Cut]],
) -> tuple[tuple[int, int], ...]:
    """Find the same kinds of cuts of a program with the same forward; those that it lacks go."""
    found: dict[int, int] = {}
    for kind, slices in sliced:
        cut = kinds[kind][0]
        same = [
            at for at, cuts in enumerate(others) if any(c.ops & set(cut.forward.ops) for c in cuts)
        ]
        for at in sorted(same, key=lambda at: (others[at][0].unit is None) != (cut.unit is None))[
            :1
        ]:
            found.setdefault(at, slices)
    return tuple(found.items())


@dataclass(frozen=True, slots=True)
class _Part:
    """An op in place of others: it stands where the op `at` stood; `twin` if it is a backward.

    `body` is what it runs if it gives no more than is read, variables of the program by `named`.
    """

    name: str
    call: Call
    at: str
    twin: str | None = None
    body: SlicedBody | None = None
    named: Mapping[str, str] = field(default_factory=dict)


def _parts(program: Program, cut: Cut, slices: int) -> list[_Part]:
    """List the ops that a cut is made of, in so many slices."""
    ends = cut.forward.ops[-1], cut.backward.own[-1]
    if cut.unit is None:
        forward, backward = (f"{op}__in_{slices}_slices" for op in ends)
        return [
            _Part(forward, _call(cut.forward.body, slices), ends[0], body=cut.forward.body),
            _Part(backward, _call(cut.backward.body, slices), ends[1], twin=forward),
        ]
    unit, body = cut.unit, cut.backward.body
    forward = f"{ends[0]}__with_gradients__in_{slices}_slices"
    named = {name: _for_one(name) for name in unit.gradients}
    whole = _call(unit.body, slices, named)
    parts = [_Part(f"{name}__total", _call(of, 1), ends[0]) for name, of in unit.totals.items()]
    parts.append(_Part(forward, whole, ends[0], body=unit.body, named=named))
    for op in cut.backward.own:
        for name in program.calls[op].results:
            if name in named:
                of = numbered(body.giving({name}))
                inputs = map(Variable, body.giving({name}).body.inputs)
                read = Variable(named[name]), Variable(unit.tangent), of, slices, *inputs
                call = Call(
                    scaled, read, {}, (name,), sequence=False,
                    workspace_bytes=whole.workspace_bytes, body=of.body,
                )  # fmt: skip
                parts.append(_Part(f"{name}__scaled", call, op, twin=forward))
    return parts


def _for_one(name: str) -> str:
    """Name a gradient for a tangent of one."""
    return f"{name}__for_one"


def _with_unit_gradients(program: Program, cuts: Iterable[Cut]) -> Program:
    """Add the gradients for a tangent of one to what a program knows."""
    names = [name for cut in cuts if cut.unit is not None for name in cut.unit.gradients]
    return replace(
        program,
        storage={**program.storage, **{_for_one(name): _for_one(name) for name in names}},
        facts={**program.facts, **{_for_one(name): program.facts[name] for name in names}},
    )


def in_slices(program: Program, chosen: Iterable[tuple[Cut, int]]) -> Program:
    """Write a program without alternatives anew, with each of these cuts in so many slices.

    No op may be in two of them.
    """
    chosen = list(chosen)
    if not chosen:
        return program
    program = _with_unit_gradients(program, (cut for cut, _ in chosen))
    groups, parts = dict[str, str](), dict[str, _Part]()
    for cut, slices in chosen:
        of_cut = _parts(program, cut, slices)
        parts.update((part.name, part) for part in of_cut)
        forward = next(part.name for part in of_cut if part.body is not None)
        groups.update(dict.fromkeys(cut.forward.ops, forward))
        groups.update(dict.fromkeys(cut.backward.own, of_cut[-1].name))
    calls = {op: call for op, call in program.calls.items() if op not in groups}
    calls.update((name, part.call) for name, part in parts.items())
    needed = values_read(program, calls)
    for name, part in parts.items():
        if part.body is not None:
            slices = part.call.args[1]
            outputs = part.body.body.outputs
            read = {n for n in outputs if program.storage[part.named.get(n, n)] in needed}
            calls[name] = _call(part.body.giving(read), slices, part.named)
    twins = {name: part.twin for name, part in parts.items() if part.twin is not None}
    beside = {name: part.at for name, part in parts.items() if name not in groups.values()}
    return with_groups(program, calls, groups, twins, beside)


def bytes_of_cut(program: Program, cut: Cut, slices: int, kept: Collection[str]) -> int:
    """Predict the most that a cut in so many slices needs, with what it reads and gives.

    Its forward stretch gives what the backward one does not make again. Values that are `kept`
    anyway do not count.
    """
    slices, calls = min(slices, cut.units), dict[str, Call]()
    for part in _parts(program, cut, slices):
        calls[part.name] = part.call
        if part.body is not None:
            outputs = set(part.body.body.outputs).difference(cut.backward.body.again)
            calls[part.name] = _call(part.body.giving(outputs), slices, part.named)
    alone = _with_unit_gradients(replace(program, calls={}, order=()), [cut])
    alone = replace(alone, calls=calls, order=tuple(calls))
    return max(alone.touched_bytes(op, kept) + call.workspace_bytes for op, call in calls.items())


def _call(sliced: SlicedBody, slices: int, named: Mapping[str, str] = MappingProxyType({})) -> Call:
    body = numbered(sliced)
    return Call(
        run_in_slices,
        (body, slices, *map(Variable, sliced.body.inputs)),
        {},
        tuple(named.get(name, name) for name in sliced.body.outputs),
        sequence=True,
        workspace_bytes=body.workspace_bytes(slices),
        body=body.body,
    )
