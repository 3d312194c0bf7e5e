"""The traced program: which call makes which variable, which variables share a buffer.

A `Program` is what a `Graph` leaves out: the code. Its ops, values and order are the graph's, so a
schedule of the graph is a schedule of the program. Variables are the program's tensors; a value of
the graph is a storage, and may have several variables, all but one of them views.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from remat_graph.graph import Graph, Numerics, Op, Stage, Value
from remat_graph.leaving import with_leaves
from remat_graph.provenance import Provenance
from remat_graph.torch.calls import Call, TensorFacts, Variable, allocated_bytes, state_bytes
from remat_graph.torch.in_place import overwrites_of
from remat_graph.torch.recomputing import may_run_again

__all__ = [
    "Alternative",
    "Call",
    "Generic",
    "Input",
    "LossCost",
    "Output",
    "Program",
    "TensorFacts",
    "Variable",
    "Write",
]

LOSS = "loss"
KEPT_BY_LOSS = "loss@kept"  # no name of a variable
_LOSS_ITEM_BYTES = 4  # losses over half precision are computed in 32 bits
_OTHER_DTYPE = torch.ops.aten.view.dtype  # autograd has no derivative of it


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that the program is given: `kind` is `parameter`, `buffer`, `attribute` or `input`.

    `key` is the dotted name on the module, or the position among the distinct input tensors.
    """

    variable: str
    kind: str
    key: str | int


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that the user gets: `variable`, made from `base` outside the differentiated program.

    `kind` is `fresh` (the program returns it), `input`, `input_view` or `view` (of what the program
    returns), `layout` that of a view of an input, `computed_from` the positions of other outputs
    that in eager autograd its gradient goes on to: see `OutputRole`.
    """

    kind: str
    variable: str
    base: str
    requires_grad: bool
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    computed_from: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """The op that writes `variable` into the buffer or input `target`, after the forward."""

    target: str
    variable: str


@dataclass(frozen=True, slots=True)
class Alternative:
    """What an op that need not run stands for: results of the op `of`, or nothing if it packs."""

    of: str | None
    numerics: Numerics


@dataclass(frozen=True, slots=True)
class LossCost:
    """Memory that a loss outside the module takes beyond the gradients it gives, in bytes.

    `kept_bytes` is held until the backward of the module is done, `workspace_bytes` besides while
    the loss runs, forward and backward.
    """

    workspace_bytes: int
    kept_bytes: int

    def at_least(self, other: LossCost) -> LossCost:
        """Give the least that covers both."""
        kept = max(self.kept_bytes, other.kept_bytes)
        most = max(cost.workspace_bytes + cost.kept_bytes for cost in (self, other))
        return LossCost(most - kept, kept)


@dataclass(frozen=True, slots=True)
class Generic:
    """A program that stands for those of all sizes of one trace, and the sizes of one of them.

    In `program` all sizes differ from one another and from every other number, so that wherever one
    of `names` stands, that size is meant; `numbers` are what those names are in the other.
    `formulas` say what each size is of those that are symbols, as Python. `texts` keeps what is
    written for all sizes.
    """

    program: Program
    names: Mapping[float, str]
    formulas: Mapping[str, str]
    numbers: Mapping[str, Any]
    texts: dict[Any, Any]


@dataclass(frozen=True, slots=True)
class Program:
    """Calls by the name of their op, in order, and what their variables mean.

    `calls` holds computing ops, `writes` the updates of mutated inputs; the op `loss` stands for
    what the user does between forward and backward. `views` are made on demand. `returned` is what
    the forward half returns, in order; `handed` is what autograd is handed for each of these: the
    whole buffer of a view, which is then made outside, for autograd lets the user change in place
    only what it knows how it was viewed; of a view as another dtype, that view. `tangents` maps a
    variable to the position in `returned` whose gradient it is; `gradients` maps input variables to
    the variable of their gradient. `overwrites` names, for the ops that can run in place, pairs of
    what they read and make in its buffer.
    `alternatives` are those of `calls` that need not run; one in the backward half that stands for
    an op of the forward half is for the backward alone. `rounding` are ops that run in another
    layout than was traced. `deferred` are positions in `returned` of what no step makes: it is made
    when it is read. `leaving` are the inputs whose gradients whoever gets them lets go of at
    once. `provenance` says where in the user's code the calls come from, as far as that
    is known. `generic` stands for all sizes of one that was read off another size, and is of no
    changed copy.
    """

    inputs: tuple[Input, ...]
    constants: Mapping[str, Any]
    calls: Mapping[str, Call]
    writes: Mapping[str, Write]
    views: Mapping[str, Call]
    order: tuple[str, ...]
    storage: Mapping[str, str]
    facts: Mapping[str, TensorFacts]
    returned: tuple[str, ...]
    tangents: Mapping[str, int]
    outputs: tuple[Output, ...]
    gradients: Mapping[str, str]
    backward_ops: frozenset[str]
    twins: Mapping[str, str]
    equivalence: Mapping[str, str] = field(repr=False)
    alternatives: Mapping[str, Alternative] = field(default_factory=dict)
    rounding: frozenset[str] = frozenset()
    deferred: frozenset[int] = frozenset()
    leaving: frozenset[str] = frozenset()
    provenance: Mapping[str, Provenance] = field(default_factory=dict, repr=False)
    handed: tuple[str, ...] = field(init=False)
    device: torch.device = field(init=False)
    overwrites: Mapping[str, tuple[tuple[str, str], ...]] = field(init=False, repr=False)
    generic: Generic | None = field(init=False, default=None, repr=False, compare=False)

    @property
    def taken(self) -> tuple[str, ...]:
        """The variables that a call hands in: inputs, then constants."""
        return (*(item.variable for item in self.inputs), *self.constants)

    @property
    def resident(self) -> frozenset[str]:
        """The values that are there before the program runs."""
        return frozenset(self.storage[n] for n in self.taken if n in self.storage)

    def calls_by_variable(self) -> dict[str, Call]:
        """Give the call that makes each variable, also of views."""
        return {
            name: call
            for calls in (self.calls, self.views)
            for call in calls.values()
            for name in call.results
            if name is not None
        }

    def makers(self) -> dict[str, str]:
        """Name, for each value, the op that makes it."""
        return {
            self.storage[name]: op
            for op, call in self.calls.items()
            for name in call.results
            if name is not None
        }

    def readers(self) -> dict[str, set[str]]:
        """Name, for each value that ops read, these ops."""
        readers: dict[str, set[str]] = {}
        for op, call in self.calls.items():
            for name in call.reads:
                if name in self.storage:
                    readers.setdefault(self.storage[name], set()).add(op)
        return readers

    @property
    def held(self) -> tuple[str, ...]:
        """Those of `returned` and `handed` that a step makes, for the user to hold."""
        pairs = enumerate(zip(self.returned, self.handed, strict=True))
        names = (name for p, pair in pairs if p not in self.deferred for name in pair)
        return tuple(dict.fromkeys(names))

    def touched_bytes(self, op: str, kept: Collection[str]) -> int:
        """Sum the bytes of what a call reads and makes, but for values that are `kept` anyway."""
        call = self.calls[op]
        names = (*call.reads, *(name for name in call.results if name is not None))
        values = {self.storage[name] for name in names if name in self.storage}
        return sum(self.facts[v].storage_bytes for v in values if v not in kept)

    @property
    def from_outside(self) -> frozenset[str]:
        """The values that no op makes."""
        return self.resident | {self.storage[name] for name in self.tangents}

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        """Return the program itself: it is immutable and belongs to no module."""
        return self

    def written_into(self, target: str) -> tuple[str, ...]:
        """Name what is written into a buffer or input: views of that are views of this."""
        return tuple(write.variable for write in self.writes.values() if write.target == target)

    def view_chain(self, variable: str, *bases: str) -> tuple[Call, ...] | None:
        """Find the calls that make `variable` out of a base, first to last; `None` without one."""
        chain: list[Call] = []
        current = variable
        while current not in bases:
            call = self.views.get(current)
            if call is None:
                return None
            chain.append(call)
            current = call.reads[0]
        return tuple(reversed(chain))

    def __post_init__(self) -> None:
        taken = set(self.returned)
        handed = tuple(
            name if position in self.deferred else self._whole(name, taken)
            for position, name in enumerate(self.returned)
        )
        object.__setattr__(self, "handed", handed)
        devices = sorted({facts.device for facts in self.facts.values()}, key=str)
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        object.__setattr__(self, "device", device)
        overwrites = overwrites_of(
            self.calls, self.storage, self.facts, views=self.views, outside=self.from_outside
        )
        object.__setattr__(self, "overwrites", overwrites)

    def _whole(self, name: str, taken: set[str]) -> str:
        root = name
        while root in self.views and self.views[root].target is not _OTHER_DTYPE:
            root = self.views[root].reads[0]
        sizes = [math.prod(self.facts[variable].shape) for variable in (name, root)]
        is_all = sizes[0] == sizes[1] and self.facts[name].is_distinct
        if root in self.taken or root in taken or not is_all:
            return name
        taken.add(root)
        return root

    @property
    def loss_allowance(self) -> LossCost:
        """What a loss outside the module may take that nobody has measured.

        For each differentiable output that is no scalar: one buffer that it keeps and two while it
        runs, one of them for the gradient, all in 32 bits at least.
        """
        kept_bytes = output_bytes = 0
        for position in self.tangents.values():
            facts = self.facts[self.returned[position]]
            if facts.shape:
                count = math.prod(facts.shape)
                kept_bytes += count * max(facts.dtype.itemsize, _LOSS_ITEM_BYTES)
                output_bytes += count * facts.dtype.itemsize
        return LossCost(2 * kept_bytes - output_bytes, kept_bytes)

    def graph(
        self, times: Mapping[str, float], workspaces: Mapping[str, int], loss: LossCost
    ) -> Graph:
        """Make the graph of this program; times in seconds and workspaces in bytes by op name."""
        resident, device = self.resident, self.device
        sizes = {KEPT_BY_LOSS: loss.kept_bytes}
        for variable, value in self.storage.items():
            facts = self.facts[variable]
            sizes[value] = allocated_bytes(facts, device)
        ops = []
        once: set[str] = set()
        last_random: dict[torch.device, str] = {}
        written = self._written()
        held = {self.storage[name] for name in self.held}
        for name in self.order:
            call = self.calls.get(name)
            inputs, outputs = self._values_of(name)
            order_after: list[str] = []
            replayable = (
                call is not None and bool(outputs) and may_run_again(call.target, call.body)
            )
            if call is not None and call.random is not None:
                if call.random in last_random:
                    order_after.append(last_random[call.random])
                last_random[call.random] = name
            if call is not None and call.replay is None and written.intersection(inputs):
                replayable = False
            if held.intersection(outputs):  # the user has it from its first computation on
                replayable = False
            alternative = self.alternatives.get(name)
            if alternative is not None and alternative.of is not None:
                replayable = replayable and alternative.of not in once
                if name in self.backward_ops and alternative.of not in self.backward_ops:
                    order_after.append(LOSS)
            if not replayable:
                once.add(name)
            pairs = self.overwrites.get(name, ())
            ops.append(
                Op(
                    name,
                    inputs,
                    outputs,
                    times.get(name, 0.0),
                    loss.workspace_bytes
                    if name == LOSS
                    else workspaces.get(name, 0) + state_bytes(call, device),
                    Stage.BACKWARD if name in self.backward_ops else Stage.FORWARD,
                    self.twins.get(name),
                    self.equivalence.get(name),
                    replayable,
                    tuple(order_after) if call is not None else self._writes_after(name),
                    tuple((self.storage[read], self.storage[new]) for read, new in pairs),
                    None if alternative is None else alternative.of,
                    alternative is not None and alternative.of is None,
                    self._numerics_of(name),
                    self.provenance.get(name),
                )
            )
        leaving = {
            self.storage[gradient]: self.storage[name]
            for name, gradient in self.gradients.items()
            if name in self.leaving
        }
        ops = with_leaves(ops, sizes, leaving)
        used = {v for op in ops for v in (*op.inputs, *op.outputs)}
        given = (g for name, g in self.gradients.items() if name not in self.leaving)
        results = {*held, *(self.storage[gradient] for gradient in given)}
        return Graph(
            tuple(Value(value, size) for value, size in sizes.items() if value in used),
            tuple(ops),
            frozenset(resident & used),
            frozenset((results - resident) & used) | {KEPT_BY_LOSS},
            LOSS,
        )

    def _numerics_of(self, name: str) -> Numerics:
        alternative = self.alternatives.get(name)
        plain = Numerics.ROUNDING if name in self.rounding else Numerics.BITWISE
        return plain if alternative is None else alternative.numerics

    def _written(self) -> set[str]:
        return {self.storage[write.target] for write in self.writes.values()}

    def _writes_after(self, name: str) -> tuple[str, ...]:
        """Name the forward ops that must have read a mutated input before it is written."""
        write = self.writes.get(name)
        if write is None:
            return ()
        target = self.storage[write.target]
        return tuple(
            op
            for op, call in self.calls.items()
            if op not in self.backward_ops
            and op not in self.alternatives
            and target in {self.storage[v] for v in call.reads}
        )

    def _values_of(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if name == LOSS:
            read = [self.returned[p] for p in self.tangents.values() if p not in self.deferred]
            written: list[str] = list(self.tangents)
        elif name in self.writes:
            read, written = [self.writes[name].variable], []
        else:
            call = self.calls[name]
            read = [v for v in call.reads if v in self.storage]
            written = [v for v in call.results if v is not None]
        storage = self.storage
        kept = (KEPT_BY_LOSS,) if name == LOSS else ()
        return (
            tuple(dict.fromkeys(storage[v] for v in read)),
            (*dict.fromkeys(storage[v] for v in written), *kept),
        )
