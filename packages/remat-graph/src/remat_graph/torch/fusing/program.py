"""A program in which groups of ops are one call each, of a kernel that can be compiled."""

from __future__ import annotations

from collections.abc import Iterable

from remat_graph.torch.calls import Call, Variable
from remat_graph.torch.fusing.again import named_again, reading_again
from remat_graph.torch.fusing.groups import Group
from remat_graph.torch.fusing.kernel import Kernel, kernel_of, run_fused
from remat_graph.torch.fusing.overwriting import writing_over
from remat_graph.torch.program import Program
from remat_graph.torch.regrouping import with_groups

__all__ = ["fused", "kernels_of", "name_of"]


def fused(program: Program, found: Iterable[Group]) -> Program:
    """Write a program without alternatives anew, with a call for each of these groups of it."""
    found, calls = tuple(found), dict(program.calls)
    groups, backward = dict[str, str](), dict[str, str | None]()
    for group in found:
        groups.update(dict.fromkeys(group.ops, name_of(group)))
        for op in group.ops:
            del calls[op]
    given_again = {name for group in found for name in group.given_again}
    if given_again:
        program, calls = reading_again(program, calls, given_again)
    for group in found:
        name = name_of(group)
        if not group.body.outputs:
            continue
        calls[name] = _call(group, program)
        if group.ops[0] in program.backward_ops:
            twins = (program.twins.get(op) for op in group.ops)
            backward[name] = next((groups.get(t, t) for t in twins if t is not None), None)
    return writing_over(with_groups(program, calls, groups, backward))


def name_of(group: Group) -> str:
    """Name the op that stands in the place of a group."""
    return f"{group.ops[-1]}__fused"


def kernels_of(program: Program) -> dict[str, Kernel]:
    """Give the kernels that the calls of a program run, by key."""
    kernels = (call.args[0] for call in program.calls.values() if call.target is run_fused)
    return {kernel.key: kernel for kernel in kernels}


def _call(group: Group, program: Program) -> Call:
    kernel = kernel_of(group.body, program.facts, group.again)
    again = {name: named_again(name) for name in group.given_again}
    return Call(
        run_fused,
        (kernel, *map(Variable, group.body.inputs)),
        {},
        tuple(again.get(name, name) for name in group.body.outputs),
        sequence=True,
        body=kernel.body,
    )
