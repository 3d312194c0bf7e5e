"""A program in which cuts run in slices: each of the two stretches of a cut is one call.

The call stands where the last op of its stretch stood; what reads of it comes behind it. Of the
forward stretch it gives what something else reads: what the backward stretch alone reads is made
again there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch

from remat_graph.torch.calls import Call, Variable
from remat_graph.torch.program import Program
from remat_graph.torch.ways.cuts import Cut
from remat_graph.torch.ways.regrouping import values_read, with_groups
from remat_graph.torch.ways.slice_by_slice import SlicedBody, numbered

__all__ = ["bytes_of_cut", "chosen_cuts", "in_slices", "read_as_traced", "run_in_slices"]


def run_in_slices(body: SlicedBody, slices: int, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Run a body in so many slices, of as equal sizes as can be."""
    return body.run(inputs, body.bounds(slices))


def read_as_traced(call: Call) -> tuple[str, ...]:
    """List what a call reads as it was traced, not for calls that run again in it."""
    if call.target is not run_in_slices:
        return call.reads
    body, _, *inputs = call.args
    pairs = zip(inputs, body.body.inputs, strict=True)
    return tuple(variable.name for variable, name in pairs if name in body.read_as_traced)


def chosen_cuts(
    kinds: Sequence[Sequence[Cut]], sliced: Iterable[tuple[int, int]]
) -> list[tuple[Cut, int]]:
    """List the cuts of these kinds, by position, each with the number of slices it can have."""
    return [
        (cut, min(slices, cut.units))
        for kind, slices in sliced
        for cuts in kinds[kind : kind + 1]  # for other gradients there may be fewer
        for cut in cuts
    ]


def in_slices(program: Program, chosen: Iterable[tuple[Cut, int]]) -> Program:
    """Write a program without alternatives anew, with each of these cuts in so many slices.

    No op may be in two of them.
    """
    chosen = list(chosen)
    if not chosen:
        return program
    calls, groups = dict(program.calls), dict[str, str]()
    forwards: dict[str, tuple[Cut, int]] = {}
    twins: dict[str, str] = {}
    for cut, slices in chosen:
        forward = f"{cut.forward.ops[-1]}__in_{slices}_slices"
        backward = f"{cut.backward.own[-1]}__in_{slices}_slices"
        groups.update(dict.fromkeys(cut.forward.ops, forward))
        groups.update(dict.fromkeys(cut.backward.own, backward))
        calls[forward] = _call(cut.forward.body, slices)
        calls[backward] = _call(cut.backward.body, slices)
        forwards[forward], twins[backward] = (cut, slices), forward
    for op in groups:
        del calls[op]
    needed = values_read(program, calls)
    for name, (cut, slices) in forwards.items():
        outputs = cut.forward.body.body.outputs
        needed_outputs = {output for output in outputs if program.storage[output] in needed}
        calls[name] = _call(cut.forward.body.giving(needed_outputs), slices)
    return with_groups(program, calls, groups, twins)


def bytes_of_cut(program: Program, cut: Cut, slices: int, kept: Collection[str]) -> int:
    """Predict the most that a cut in so many slices needs, with what it reads and gives.

    Its forward stretch gives what the backward one does not make again. Values that are `kept`
    anyway do not count.
    """
    slices = min(slices, cut.units)
    outputs = set(cut.forward.body.body.outputs).difference(cut.backward.body.again)
    calls = {
        "forward": _call(cut.forward.body.giving(outputs), slices),
        "backward": _call(cut.backward.body, slices),
    }
    alone = replace(program, calls=calls, order=tuple(calls))
    return max(alone.touched_bytes(op, kept) + call.workspace_bytes for op, call in calls.items())


def _call(sliced: SlicedBody, slices: int) -> Call:
    body = numbered(sliced)
    return Call(
        run_in_slices,
        (body, slices, *map(Variable, sliced.body.inputs)),
        {},
        sliced.body.outputs,
        sequence=True,
        workspace_bytes=body.workspace_bytes(slices),
        body=body.body,
    )
