"""Other ways to make what a program makes: a list of rules, each for one kind of operator.

A rule adds calls that need not run: what packs a value into fewer bytes, what unpacks it, and
backward operators that read something else than the traced ones. Each makes tensors of the same
shape, layout and type as what it stands for. Source: MONeT (Shah et al. 2021), sections 4.4 and 5:
operators activated by their output, by their input or by something small between, and convolution
backwards in halves; Gist (Jain et al. 2018), for copies in 16 bits.

What cannot pay is left out: small values, masks of what the backward reads anyway, what the user
holds. Linear layers need no rule: the two products of their backward are two operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from remat_graph.graph import Numerics
from remat_graph.torch.kernels.packing import (
    backward_of_kept,
    backward_of_pool,
    mask_workspace,
    offset_type,
    offsets_workspace,
    pack_mask,
    pack_offsets,
    packed_bytes,
    unpack_mask,
)
from remat_graph.torch.lowering import equivalence_of
from remat_graph.torch.operators import operator_of
from remat_graph.torch.program import LOSS, Alternative, Call, Program, Variable
from remat_graph.torch.ways.additions import (
    Addition,
    ProgramReader,
    is_dense,
    vector,
)

__all__ = ["add_alternatives"]

aten = torch.ops.aten

_HALF = torch.bfloat16  # with the range of 32 bits: nothing becomes infinite


def add_alternatives(program: Program, numerics: Numerics) -> Program:
    """Add to a program without alternatives those that are as exact as asked for."""
    reader = ProgramReader(program)
    rules = [rule for rule, exactness in _RULES.items() if numerics.allows(exactness)]
    additions = [
        addition
        for op in program.order
        if op in program.calls
        for rule in rules
        for addition in rule(reader, op, program.calls[op])
    ]
    return _extended(program, additions) if additions else program


def _extended(program: Program, additions: list[Addition]) -> Program:
    storage, facts, views = dict(program.storage), dict(program.facts), dict(program.views)
    calls, equivalence = dict(program.calls), dict(program.equivalence)
    twins, backward = dict(program.twins), set(program.backward_ops)
    provenance = dict(program.provenance)
    behind: dict[str, list[str]] = {}
    for new in additions:
        for name, call, fact in new.views:
            storage[name] = storage[call.reads[0]]
            views[name], facts[name] = call, fact
        if new.result is not None:
            storage[new.name], facts[new.name] = new.name, new.result
        calls[new.name] = new.call
        origin = provenance.get(new.alternative.of or new.after)
        if origin is not None:
            provenance[new.name] = origin
        equivalence[new.name] = equivalence_of(new.call, facts)
        if new.after in backward:
            backward.add(new.name)
            if new.after in twins:
                twins[new.name] = twins[new.after]
        behind.setdefault(new.after, []).append(new.name)
    return replace(
        program,
        calls=calls,
        views=views,
        order=tuple(name for op in program.order for name in (op, *behind.get(op, ()))),
        storage=storage,
        facts=facts,
        backward_ops=frozenset(backward),
        twins=twins,
        equivalence=equivalence,
        alternatives={new.name: new.alternative for new in additions},
        provenance=provenance,
    )


def _exact(op: str) -> Alternative:
    return Alternative(op, Numerics.BITWISE)


def _halves_of_convolution(reader: ProgramReader, op: str, call: Call) -> Iterator[Addition]:
    """Make the gradients of input and weight apart; that of the input reads none of the input."""
    if call.target is not aten.convolution_backward.default or None in call.results[:2]:
        return
    grad, x, weight, *rest, mask = call.args
    if not reader.is_kept(x):
        return
    of_input, of_weight, of_bias = call.results
    stand_in = reader.stand_in(op, grad, x)
    sizes, views = (x, ()) if stand_in is None else (Variable(stand_in[0]), (stand_in,))
    args = (grad, sizes, weight, *rest, [True, False, False])
    half = replace(call, args=args, results=(of_input, None, None))
    yield Addition(f"{op}__input", half, op, _exact(op), views=views)
    args = (grad, x, weight, *rest, [False, True, mask[2]])
    half = replace(call, args=args, results=(None, of_weight, of_bias))
    yield Addition(f"{op}__weight", half, op, _exact(op))


def _pool_by_sizes(reader: ProgramReader, op: str, call: Call) -> Iterator[Addition]:
    """Run the backward of a pooling without what was pooled."""
    if not operator_of(call.target).sizes_alone or not reader.is_kept(call.args[1]):
        return
    grad, x, *rest = call.args
    stand_in = reader.stand_in(op, grad, x)
    if stand_in is not None:
        by_sizes = replace(call, args=(grad, Variable(stand_in[0]), *rest))
        yield Addition(f"{op}__by_sizes", by_sizes, op, _exact(op), views=(stand_in,))


def _pool_by_offsets(reader: ProgramReader, op: str, call: Call) -> Iterator[Addition]:
    """Keep where the maxima of a pooling lie in 8 or 16 bits each, in place of 64."""
    into = operator_of(call.target).into
    if into is None or not reader.is_kept(call.args[-1]):
        return
    grad, _, kernel, stride, padding, dilation, ceil_mode, indices = call.args
    (result,) = call.results
    if result is None or reader.readers(indices.name) != [op]:
        return
    of_result, of_indices = reader.facts[result], reader.facts[indices.name]
    axes = 3 if "max_pool3d" in call.name else 2
    settings = (kernel, stride or kernel, padding, dilation)
    window = [list(item) * (axes if len(item) == 1 else 1) for item in settings]
    dtype = offset_type(math.prod(window[0]))
    if dtype is None or not is_dense(of_result):
        return
    workspace = offsets_workspace(of_indices.shape)
    packed = f"{indices.name}__packed"
    args: tuple[Any, ...] = (indices, list(of_result.shape[-axes:]), window, dtype)
    pack = Call(pack_offsets, args, {}, (packed,), sequence=False, workspace_bytes=workspace)
    flat = vector(math.prod(of_indices.shape), dtype, of_indices.device)
    yield reader.packing(pack, indices.name, flat)
    layout = (list(of_indices.shape), list(of_result.shape), list(of_result.stride))
    args = (into, grad, Variable(packed), *layout, window, ceil_mode)
    by_offsets = Call(backward_of_pool, args, {}, (result,), False, workspace_bytes=workspace)
    yield Addition(f"{op}__by_offsets", by_offsets, op, _exact(op))


def _by_other_end(reader: ProgramReader, op: str, call: Call) -> Iterator[Addition]:
    """Read the output of an activation in place of its input, or the other way round.

    Only what the backward reads anyway is worth reading instead.
    """
    other = _other_end(reader, call)
    if other is not None and reader.backward_readers(other) - {op}:
        args = [call.args[0], Variable(other), *call.args[2:]]
        if call.target is aten.leaky_relu_backward.default:
            args[3] = True  # what is read is the result
        yield Addition(f"{op}__by_other", replace(call, args=tuple(args)), op, _exact(op))


def _other_end(reader: ProgramReader, call: Call) -> str | None:
    """Find the other end of an activation whose signs, or limits, are those of the one read."""
    if not operator_of(call.target).by_signs or not reader.is_kept(call.args[1]):
        return None
    read = call.args[1].name
    if call.target is aten.hardtanh_backward.default:
        return reader.result_of(aten.hardtanh.default, read, *call.args[2:])
    if call.target is aten.leaky_relu_backward.default:
        slope, is_result = call.args[2:]
        may_read = slope > 0 and not is_result
        return reader.result_of(aten.leaky_relu.default, read, slope) if may_read else None
    made_by = reader.program.calls[reader.maker(read)]
    if made_by.target is not aten.relu.default or call.args[2] != 0:
        return None
    source = made_by.args[0].name
    return source if reader.facts[source] == reader.facts[read] else None


def _by_signs(reader: ProgramReader, op: str, call: Call) -> Iterator[Addition]:
    """Keep one bit of each element of what a ReLU, or one with two limits, reads in the backward.

    That is worth it where nothing else in the backward reads either end of it.
    """
    pack = operator_of(call.target).packs
    if pack is None or not reader.is_kept(call.args[1]):
        return
    (result,) = call.results
    grad, read, *limits = call.args
    other = _other_end(reader, call)
    ends = [read.name] if other is None else [read.name, other]
    if result is None or any(reader.backward_readers(name) - {op} for name in ends):
        return
    of_read, of_result = reader.facts[read.name], reader.facts[result]
    if (of_read.shape, of_read.stride) != (of_result.shape, of_result.stride) or not is_dense(
        of_result
    ):
        return
    name, size = f"{read.name}__signs", packed_bytes(math.prod(of_read.shape))
    args = (read, list(of_read.stride), *limits)
    packing = Call(pack, args, {}, (name,), sequence=False, workspace_bytes=mask_workspace(size))
    yield reader.packing(packing, read.name, vector(size, torch.uint8, of_read.device))
    args = (grad, Variable(name), list(of_result.shape), list(of_result.stride))
    by_signs = Call(
        backward_of_kept, args, {}, (result,), sequence=False, workspace_bytes=mask_workspace(size)
    )
    yield Addition(f"{op}__by_signs", by_signs, op, _exact(op))


def _packed_masks(reader: ProgramReader, op: str, call: Call) -> Iterator[Addition]:
    """Keep a mask as one bit for each element, in place of a byte."""
    for mask in call.results:
        if mask is None or not _is_kept_of(torch.bool, mask, reader):
            continue
        of_mask = reader.facts[mask]
        name, size = f"{mask}__packed", packed_bytes(math.prod(of_mask.shape))
        pack = Call(pack_mask, (Variable(mask), list(of_mask.stride)), {}, (name,), sequence=False)
        yield reader.packing(pack, mask, vector(size, torch.uint8, of_mask.device))
        args = (Variable(name), list(of_mask.shape), list(of_mask.stride))
        unpack = Call(
            unpack_mask, args, {}, (mask,), sequence=False, workspace_bytes=mask_workspace(size)
        )
        yield Addition(f"{mask}__unpacked", unpack, op, _exact(op))


def _copies_in_half(reader: ProgramReader, op: str, call: Call) -> Iterator[Addition]:
    """Keep a value in 16 bits for the backward; the forward never reads what comes of it."""
    value = call.results[0]  # statistics of a norm, which come behind it, are kept whole
    if value is None or not _is_kept_of(torch.float32, value, reader):
        return
    fact = reader.facts[value]
    name = f"{value}__half"
    cast = Call(aten._to_copy.default, (Variable(value),), {"dtype": _HALF}, (name,), False)
    half = replace(fact, dtype=_HALF, storage_bytes=fact.storage_bytes // 2)
    yield Addition(name, cast, op, Alternative(None, Numerics.LOSSY), half)
    back = {"dtype": fact.dtype}
    cast = Call(aten._to_copy.default, (Variable(name),), back, (value,), False)
    yield Addition(f"{value}__single", cast, LOSS, Alternative(op, Numerics.LOSSY))


def _is_kept_of(dtype: torch.dtype, name: str, reader: ProgramReader) -> bool:
    return (
        reader.facts[name].dtype == dtype
        and reader.is_kept(Variable(name))
        and reader.may_be_made_again(name)
    )


# Rules join several operators (an activation, its backward, what packs): no record of one has them.
_RULES: dict[Callable[[ProgramReader, str, Call], Iterator[Addition]], Numerics] = {
    _halves_of_convolution: Numerics.BITWISE,
    _pool_by_sizes: Numerics.BITWISE,
    _pool_by_offsets: Numerics.BITWISE,
    _by_other_end: Numerics.BITWISE,
    _by_signs: Numerics.BITWISE,
    _packed_masks: Numerics.BITWISE,
    _copies_in_half: Numerics.LOSSY,
}
