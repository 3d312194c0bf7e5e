"""Other layouts: which ops of a program run in channels_last, and the program that this leaves.

An op *can* if all images that it reads and makes are contiguous, it is of a kind whose result is
the same function in either layout, and it really makes channels_last of channels_last, which is
tried. In between stand copies: an image is converted before the first op that wants it so. Which
ops do is a minimum cut: an op pays its time in its layout, an image a conversion where its maker
and a reader differ, once in each direction. That finds whole stretches, where no op alone would
gain. Weights stay as they are: what an operator does with them is within its time.

Guarantee: the sum of all times, as they are given, is least. Limits: what a budget makes of it is
not looked at, so planning compares it with the program as traced; results are the same up to
rounding. Source: cuts for labels, Boykov and others 2001.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import torch
from torch.utils import _pytree as pytree

from remat_graph.provenance import Provenance
from remat_graph.torch.lowering import equivalence_of
from remat_graph.torch.operators import operator_of
from remat_graph.torch.program import LOSS, Call, Program, TensorFacts, Variable

__all__ = ["choose_layouts", "lay_out"]

aten = torch.ops.aten

Times = Callable[[Program], Mapping[str, float]]

_SUFFIX = "__channels_last"


def choose_layouts(program: Program, times_of: Times) -> frozenset[str]:
    """Choose the ops that are to run in channels_last for a fastest step.

    `times_of` gives the seconds of the ops of a program; it is asked twice.
    """
    able = _able(program)
    if not able:
        return frozenset()
    everywhere = _Writer(program, able).write(frozenset(able), all_conversions=True)
    return _cut(program, able, times_of(program), times_of(everywhere))


def lay_out(program: Program, chosen: frozenset[str]) -> Program:
    """Write a program without alternatives anew, with those of the chosen ops that can laid out."""
    able = _able(program) if chosen else {}
    chosen = chosen & able.keys()
    return _Writer(program, able).write(chosen) if chosen else program


def _able(program: Program) -> dict[str, _Laid]:
    by_op = {op: _laid(program, op) for op in program.calls}
    return {op: laid for op, laid in by_op.items() if laid is not None}


@dataclass(frozen=True, slots=True)
class _Laid:
    """The images of an op that can: what it reads, by variable and by buffer, and makes."""

    reads: dict[str, str]
    makes: tuple[str, ...]


def _laid(program: Program, op: str) -> _Laid | None:
    call = program.calls[op]
    operator = operator_of(call.target)
    if not operator.channels_last or call.random is not None:
        return None
    if call.target is aten.cat.default and (*call.args, 0)[1] not in (1, -3):
        return None
    args = [arg for i, arg in enumerate(call.args) if i != operator.weight]
    names = {leaf.name for leaf in pytree.tree_leaves(args) if isinstance(leaf, Variable)}
    facts = {name: _laid_facts(program, name) for name in names if _has_axes(program, name)}
    laid = {name: fact for name, fact in facts.items() if fact is not None}
    if not laid or len(laid) < len(facts):
        return None
    makes = _made_so(program, call, laid)
    if not makes or any(program.storage[name] != name for name in makes):
        return None
    return _Laid({name: program.storage[name] for name in sorted(laid)}, makes)


def _has_axes(program: Program, name: str) -> bool:
    return name in program.facts and len(program.facts[name].shape) == 4


def _laid_facts(program: Program, name: str) -> TensorFacts | None:
    """Describe an image, or a part of one, in channels_last; `None` if this is neither."""
    view = program.views.get(name)
    if view is None:
        is_whole = program.storage.get(name) == name and _is_image(program, name)
        return _in_channels_last(program.facts[name]) if is_whole else None
    base = _laid_facts(program, view.reads[0]) if operator_of(view.target).channels_last else None
    if base is None:
        return None
    like = torch.empty_strided(base.shape, base.stride, device="meta")
    fake = view.target(like, *view.args[1:], **view.kwargs)
    stride, offset = tuple(fake.stride()), base.offset + int(fake.storage_offset())
    return replace(base, shape=tuple(fake.shape), stride=stride, offset=offset)


def _is_image(program: Program, name: str) -> bool:
    """Whether this is four-dimensional, contiguous, fills its buffer, and has another layout."""
    facts = program.facts.get(name)
    if facts is None or len(facts.shape) != 4 or name not in program.storage:
        return False
    like = torch.empty(facts.shape, device="meta")
    whole = math.prod(facts.shape) * facts.dtype.itemsize == facts.storage_bytes
    is_plain = facts.stride == like.stride() and facts.offset == 0 and whole
    return is_plain and not like.is_contiguous(memory_format=torch.channels_last)


def _in_channels_last(facts: TensorFacts) -> TensorFacts:
    like = torch.empty(facts.shape, device="meta", memory_format=torch.channels_last)
    return replace(facts, stride=tuple(like.stride()))


def _same_layout(stride: Sequence[int], facts: TensorFacts) -> bool:
    """Compare strides where there is more than one element."""
    axes = zip(stride, facts.stride, facts.shape, strict=True)
    return all(one == other for one, other, size in axes if size > 1)


def _made_so(
    program: Program, call: Call, images: Mapping[str, TensorFacts]
) -> tuple[str, ...] | None:
    """Run an op on images in channels_last; say which results are, `None` if others are not."""

    def fill(item: Any) -> Any:
        if not isinstance(item, Variable):
            return item
        if item.name not in program.facts:
            return program.constants[item.name]
        facts = program.facts[item.name]
        facts = _in_channels_last(facts) if item.name in images else facts
        tensor = torch.empty_strided(
            facts.shape, facts.stride, dtype=facts.dtype, device=facts.device
        )
        return tensor.fill_(0.5 if facts.dtype.is_floating_point else 0)

    leaf = {"is_leaf": lambda item: isinstance(item, Variable)}
    args, kwargs = pytree.tree_map(fill, (call.args, dict(call.kwargs)), **leaf)
    try:
        with torch.no_grad():
            returned = call.target(*args, **kwargs)
    except RuntimeError:
        return None
    parts = list(returned) if call.sequence else [returned]
    names = []
    for name, part in zip(call.results, parts, strict=True):
        if name is None:
            continue
        facts = program.facts[name]
        if _same_layout(part.stride(), facts):
            continue
        if not _is_image(program, name) or not _same_layout(
            part.stride(), _in_channels_last(facts)
        ):
            return None
        names.append(name)
    return tuple(names)


@dataclass(slots=True)
class _Writer:
    """Writes a program in which some ops run in channels_last."""

    program: Program
    able: Mapping[str, _Laid]
    _calls: dict[str, Call] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)
    _variants: set[str] = field(default_factory=set)  # in channels_last, or copied back
    _moved: set[str] = field(default_factory=set)  # whose makers run in channels_last
    _facts: dict[str, TensorFacts] = field(default_factory=dict)
    _views: dict[str, Call] = field(default_factory=dict)
    _backward: set[str] = field(default_factory=set)
    _provenance: dict[str, Provenance] = field(default_factory=dict)

    def write(self, chosen: frozenset[str], *, all_conversions: bool = False) -> Program:
        """Write it; with `all_conversions` also those that nothing reads, to know their costs."""
        program = self.program
        self._facts, self._views = dict(program.facts), dict(program.views)
        self._calls, self._order, self._variants, self._moved = {}, [], set(), set()
        self._backward = set(program.backward_ops)
        self._provenance = dict(program.provenance)
        ends = {*program.held, *program.gradients.values()}
        ends = {program.storage[name] for name in ends if name in program.storage}
        for op in program.order:
            call = program.calls.get(op)
            for value in sorted(self._read(op)):
                wanted = op in chosen and value in self.able[op].reads.values()
                self._have(value + _SUFFIX if wanted else value, op)
            self._order.append(op)
            if call is not None:
                self._calls[op] = self._laid_out(op, call) if op in chosen else call
            for name in self.able[op].makes if op in chosen else ():
                if name in ends or all_conversions:
                    self._have(name, op)
        storage = dict(program.storage)
        for name in self._facts.keys() - program.facts.keys():
            root = name
            while root in self._views:
                root = self._views[root].reads[0]
            storage[name] = root
        return replace(
            program,
            calls=self._calls,
            views=self._views,
            order=tuple(self._order),
            storage=storage,
            facts=self._facts,
            backward_ops=frozenset(self._backward),
            provenance=self._provenance,
            rounding=program.rounding | chosen,
            equivalence={op: equivalence_of(call, self._facts) for op, call in self._calls.items()},
        )

    def _laid_out(self, op: str, call: Call) -> Call:
        """Name the images that an op reads and makes as they are in channels_last."""
        laid = self.able[op]
        names = {name: self._view(name) for name in laid.reads}
        for name in laid.makes:
            self._facts[name + _SUFFIX] = _in_channels_last(self.program.facts[name])
            self._variants.add(name + _SUFFIX)
            self._moved.add(name)
        names_out = {name: name + _SUFFIX for name in laid.makes}
        replay = None if call.replay is None else _renamed(call.replay, names, names_out)
        return replace(_renamed(call, names, names_out), replay=replay)

    def _view(self, name: str) -> str:
        """Name an image, or a part of one, that is there in channels_last; view it if need be."""
        view = self.program.views.get(name)
        if view is None:
            return name + _SUFFIX
        base = self._view(view.reads[0])
        if view.target is not aten.slice.Tensor:
            return base
        other, facts = name + _SUFFIX, _laid_facts(self.program, name)
        if facts is not None:
            args = (Variable(base), *view.args[1:])
            self._views[other] = replace(view, args=args, results=(other,))
            self._facts[other] = facts
        return other

    def _read(self, op: str) -> set[str]:
        """List the buffers that an op reads."""
        program = self.program
        call = program.calls.get(op)
        if call is not None:
            names: Iterable[str] = call.reads
        elif op == LOSS:
            names = (program.returned[position] for position in program.tangents.values())
        else:
            names = (program.writes[op].variable,)
        return {program.storage[name] for name in names if name in program.storage}

    def _have(self, name: str, before: str) -> None:
        """Convert an image where an op wants it in the layout in which it is not there."""
        value = name.removesuffix(_SUFFIX)
        if name in self._variants or (name == value and value not in self._moved):
            return
        source, layout = value, torch.channels_last
        if name == value:
            source, layout = value + _SUFFIX, torch.contiguous_format
        op = f"{name}__copy"
        call = Call(
            aten.clone.default, (Variable(source),), {"memory_format": layout}, (name,), False
        )
        self._calls[op] = call
        self._order.append(op)
        self._variants.add(name)
        if name != value:
            self._facts[name] = _in_channels_last(self.program.facts[value])
        if before in self._backward:
            self._backward.add(op)
        if before in self._provenance:
            self._provenance[op] = self._provenance[before]


def _renamed(call: Call, reads: Mapping[str, str], makes: Mapping[str, str]) -> Call:
    def rename(item: Any) -> Any:
        is_renamed = isinstance(item, Variable) and item.name in reads
        return Variable(reads[item.name]) if is_renamed else item

    weight = operator_of(call.target).weight
    args = tuple(
        arg
        if i == weight
        else pytree.tree_map(rename, arg, is_leaf=lambda item: isinstance(item, Variable))
        for i, arg in enumerate(call.args)
    )
    results = tuple(None if name is None else makes.get(name, name) for name in call.results)
    return replace(call, args=args, results=results)


def _cut(
    program: Program,
    able: Mapping[str, _Laid],
    plain: Mapping[str, float],
    laid: Mapping[str, float],
) -> frozenset[str]:
    """Choose the ops that run in channels_last: those on the side of the sink of a least cut."""
    net: nx.DiGraph[Any] = nx.DiGraph()

    def pay(one: object, other: object, seconds: float) -> None:
        paid = net.get_edge_data(one, other, {"capacity": 0.0})["capacity"]
        net.add_edge(one, other, capacity=paid + seconds)

    maker = {name: op for op, images in able.items() for name in images.makes}
    readers: dict[str, list[str]] = {}
    fixed: set[str] = {program.storage[n] for n in (*program.held, *program.gradients.values())}
    for op in program.order:
        call = program.calls.get(op)
        names = call.reads if call is not None else ()
        sources = able[op].reads.values() if op in able else ()
        for source in dict.fromkeys(sources):
            readers.setdefault(source, []).append(op)
        fixed |= {program.storage[n] for n in names if n in program.storage} - set(sources)
        if call is None and op != LOSS:
            fixed.add(program.storage[program.writes[op].variable])
    for op in able:
        pay("contiguous", op, laid[op])
        pay(op, "channels_last", plain[op])
    for value in {*maker, *readers}:
        layout = maker.get(value, "contiguous")
        copy = laid.get(f"{value}{_SUFFIX}__copy", laid.get(f"{value}__copy", 0.0))
        pay(layout, ("to", value), copy)
        pay(("from", value), layout, copy)
        for reader in readers.get(value, ()):
            pay(("to", value), reader, math.inf)
            pay(reader, ("from", value), math.inf)
        if value in fixed:
            pay("contiguous", ("from", value), math.inf)
    _, (_, there) = nx.minimum_cut(net, "contiguous", "channels_last")
    return frozenset(op for op in able if op in there)
