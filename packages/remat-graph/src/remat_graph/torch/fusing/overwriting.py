"""Which inputs end in a group, so that it makes outputs in their buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from remat_graph.torch.calls import Body, Call, TensorFacts, is_view
from remat_graph.torch.fusing.kernel import kernel_of, run_fused
from remat_graph.torch.lowering import equivalence_of
from remat_graph.torch.program import Program

__all__ = ["writing_over"]

_SMALL = 16  # times smaller than the largest output: not worth it
_ALMOST = 0.95  # of a buffer: Inductor takes it for what is so much smaller, too


def writing_over(program: Program) -> Program:
    """Let each group of a program without alternatives write over inputs that end in it.

    An input ends in the last call that reads it, in the order of the program, if no user holds it.
    """
    place = {op: at for at, op in enumerate(program.order)}
    last = {
        value: max(readers, key=place.__getitem__) for value, readers in program.readers().items()
    }
    held = {*program.held, *program.gradients.values()}
    held.update(write.variable for write in program.writes.values())
    kept = program.from_outside | {program.storage[name] for name in held}
    calls = dict(program.calls)
    for op, call in program.calls.items():
        if call.target is run_fused:
            storage = program.storage
            count = Counter(storage.get(name) for name in call.variables)
            ends = {
                number
                for number, name in zip(call.args[0].body.inputs, call.variables, strict=True)
                if name in storage
                and name not in program.views
                and storage[name] not in kept
                and last[storage[name]] == op
                and count[storage[name]] == 1
            }
            calls[op] = _over(call, ends)
    changed = {op for op, call in calls.items() if call is not program.calls[op]}
    equivalence = {op: equivalence_of(calls[op], program.facts) for op in changed}
    return replace(program, calls=calls, equivalence={**program.equivalence, **equivalence})


def _over(call: Call, ends: set[str]) -> Call:
    kernel = call.args[0]
    pairs = tuple(_pairs(kernel.body, kernel.facts, ends))
    if not pairs:
        return call
    body = replace(kernel.body, overwrites=pairs)
    kernel = kernel_of(body, kernel.facts, kernel.again)
    return replace(call, args=(kernel, *call.args[1:]), body=kernel.body)


def _pairs(
    body: Body, facts: Mapping[str, TensorFacts], ends: set[str]
) -> Iterator[tuple[str, str]]:
    """Pair inputs that end with outputs of their size, large ones first.

    What few calls read is taken first: an input that is also summed is still read when the output
    is made.
    """
    read = _reads(body)
    sizes = {name: facts[name].storage_bytes for name in body.outputs}
    waiting = sorted((n for n in ends if facts[n].is_whole), key=lambda n: (read[n], n))
    for new in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if sizes[new] * _SMALL < max(sizes.values()) or not facts[new].is_whole:
            continue
        for old in waiting:
            own = facts[old].storage_bytes
            if (
                own == sizes[new]
                and (facts[old].dtype, facts[old].device) == (facts[new].dtype, facts[new].device)
                and not any(_ALMOST * own <= size < own for size in sizes.values())
            ):
                waiting.remove(old)
                yield old, new
                break


def _reads(body: Body) -> Counter[str]:
    """Count the calls that read each input of a body, through views or not."""
    base, count = dict[str, str](), Counter[str]()
    for call in body.calls:
        if is_view(call):
            source = base.get(call.reads[0], call.reads[0])
            base.update((name, source) for name in call.results if name is not None)
        else:
            count.update({base.get(name, name) for name in call.reads})
    return count
