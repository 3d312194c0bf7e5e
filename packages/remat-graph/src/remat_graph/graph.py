"""The training graph: which values each operation reads and makes, what they weigh, what they cost.

A `Graph` is a list of operations in execution order, forward operations first. A `Value` is one
buffer: a tensor together with all its views. Gradient sums are operations of their own. These types
carry no torch and are what every package meets in.

A value may have several makers. The first is its producer, an operation that every schedule owes;
the others are *alternatives* of that operation, which run instead of it, or again: the two halves
of a backward against the whole, or what unpacks a packed copy. What packs one is *optional*: it is
owed by nobody. Source: MONeT (Shah et al. 2021), section 4, where a choice is of one per operator.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from remat_graph.errors import InvalidGraph
from remat_graph.provenance import Provenance

__all__ = ["Graph", "Numerics", "Op", "Stage", "Value"]

T = TypeVar("T")

_MOST_TIME = 1e100  # so that no sum of times overflows


class Stage(enum.StrEnum):
    """The half of a training step to which an operation belongs."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Numerics(enum.StrEnum):
    """How near an operation is to the one that it stands for; each contains those before it.

    `BITWISE`: the same bits. `ROUNDING`: other orders of summing, as of another algorithm or
    layout. `LOSSY`: less precision, as of a copy in 16 bits.
    """

    BITWISE = "bitwise"
    ROUNDING = "rounding"
    LOSSY = "lossy"

    def allows(self, other: Numerics) -> bool:
        """Whether what asks for this may use the other."""
        order = list(Numerics)
        return order.index(other) <= order.index(self)


@dataclass(frozen=True, slots=True)
class Value:
    """One buffer: a tensor together with all its views.

    Raises:
        InvalidGraph: if the name is empty, or the size is no int or negative.
    """

    name: str
    size_bytes: int

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidGraph("a value needs a name that is not empty")
        _check_bytes(f"value {self.name!r}", "size_bytes", self.size_bytes)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: it reads `inputs` and allocates all of `outputs`.

    `time` is in seconds (or any unit, the same for the whole graph). `workspace_bytes` is what it
    allocates and gives back while it runs. `twin` names the forward operation that a backward one
    differentiates. Operations of equal `equivalence` run the same code on the same shapes. One with
    `replayable=False` is computed exactly once by every schedule. `order_after` are operations
    whose first computation must precede this one's; it costs no memory. `overwrites` are pairs of
    an input and an output: the output takes the buffer of the input, if that is freed right after.
    `alternative_of` names the operation some of whose outputs this one makes in another way;
    `numerics` says how near. One that is `optional` need not run at all. `provenance` says where
    in the user's code it comes from; nothing that is planned depends on it.

    Raises:
        InvalidGraph: if the name is empty, the time is negative or above 1e100, the workspace is no
            int or negative, a value is named twice in the inputs or in the outputs, or what
            overwrites and is overwritten are not an output and an input, each named once.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    time: float
    workspace_bytes: int = 0
    stage: Stage = Stage.FORWARD
    twin: str | None = None
    equivalence: str | None = None
    replayable: bool = True
    order_after: tuple[str, ...] = ()
    overwrites: tuple[tuple[str, str], ...] = ()
    alternative_of: str | None = None
    optional: bool = False
    numerics: Numerics = Numerics.BITWISE
    provenance: Provenance | None = None

    @property
    def owed(self) -> bool:
        """Whether every schedule runs it, or alternatives of it."""
        return self.alternative_of is None and not self.optional

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidGraph("an op needs a name that is not empty")
        if not 0 <= self.time <= _MOST_TIME:
            raise InvalidGraph(
                f"op {self.name!r} has time={self.time}; it must be from 0 to {_MOST_TIME:.0e}"
            )
        # Equal times (1 and 1.0, -0.0 and 0.0) look alike, so that bytes and hashes agree.
        object.__setattr__(self, "time", float(self.time) + 0.0)
        _check_bytes(f"op {self.name!r}", "workspace_bytes", self.workspace_bytes)
        for kind, names in (("inputs", self.inputs), ("outputs", self.outputs)):
            if len(set(names)) != len(names):
                raise InvalidGraph(f"op {self.name!r} names a value twice in its {kind}: {names}")
        if self.overwrites:
            self._check_overwrites()

    def _check_overwrites(self) -> None:
        read = [pair[0] for pair in self.overwrites]
        written = [pair[1] for pair in self.overwrites]
        if not (set(read) <= set(self.inputs) and set(written) <= set(self.outputs)):
            raise InvalidGraph(
                f"op {self.name!r} has overwrites={self.overwrites}; each must be a pair of one of "
                f"its inputs {self.inputs} and one of its outputs {self.outputs}"
            )
        if len(set(read)) != len(read) or len(set(written)) != len(written):
            raise InvalidGraph(
                f"op {self.name!r} has overwrites={self.overwrites}; each value may occur once"
            )


@dataclass(frozen=True, slots=True)
class Graph:
    """Operations in execution order over values.

    `resident` values (parameters, inputs) have no producer, are always alive and are not counted.
    `results` must be alive when a schedule ends. `boundary` names the first backward operation;
    `None` for a graph without a backward half.

    Raises:
        InvalidGraph: naming the op or value at fault, if names collide, a value has no producer, or
            two of which none is an alternative, an op reads something made later, a twin is not a
            forward op, the order of the stages contradicts `boundary`, a value is to overwrite
            another that is resident or has another size, an alternative makes what its op does not
            or runs in the other half, or something owed needs what is optional.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    resident: frozenset[str] = frozenset()
    results: frozenset[str] = frozenset()
    boundary: str | None = None

    _value_by_name: dict[str, Value] = field(init=False, repr=False, compare=False)
    _op_index: dict[str, int] = field(init=False, repr=False, compare=False)
    _producer: dict[str, int] = field(init=False, repr=False, compare=False)
    _makers: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _consumers: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _has_alternatives: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "resident", frozenset(self.resident))
        object.__setattr__(self, "results", frozenset(self.results))
        object.__setattr__(
            self, "_value_by_name", _unique("value", ((v.name, v) for v in self.values))
        )
        object.__setattr__(
            self, "_op_index", _unique("op", ((op.name, i) for i, op in enumerate(self.ops)))
        )
        makers, consumers = self._wire()
        object.__setattr__(self, "_makers", {v: tuple(ops) for v, ops in makers.items()})
        object.__setattr__(self, "_producer", {v: ops[0] for v, ops in makers.items()})
        object.__setattr__(self, "_consumers", {v: tuple(c) for v, c in consumers.items()})
        object.__setattr__(self, "_has_alternatives", not all(op.owed for op in self.ops))
        self._check_sets()
        self._check_stages()
        self._check_alternatives()

    def __getstate__(self) -> tuple[object, ...]:
        return (self.values, self.ops, self.resident, self.results, self.boundary)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        names = ("values", "ops", "resident", "results", "boundary")
        for name, item in zip(names, state, strict=True):
            object.__setattr__(self, name, item)
        self.__post_init__()

    def _wire(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        producer: dict[str, list[int]] = {}
        consumers: dict[str, list[int]] = {v.name: [] for v in self.values}
        for i, op in enumerate(self.ops):
            for v in op.inputs:
                if v not in self._value_by_name:
                    raise InvalidGraph(
                        f"op {op.name!r} reads {v!r}, which is no value of the graph"
                    )
                if v not in self.resident and v not in producer:
                    raise InvalidGraph(
                        f"op {op.name!r} reads {v!r} before any op has made it; "
                        f"ops must be in execution order, and what needs no op must be resident"
                    )
                consumers[v].append(i)
            for v in op.outputs:
                if v not in self._value_by_name:
                    raise InvalidGraph(
                        f"op {op.name!r} makes {v!r}, which is no value of the graph"
                    )
                if v in producer and self.ops[producer[v][0]].name != op.alternative_of:
                    first = self.ops[producer[v][0]].name
                    raise InvalidGraph(
                        f"value {v!r} is made by both {first!r} and {op.name!r}, which is no "
                        f"alternative of it; one must suffice"
                    )
                if v in self.resident:
                    raise InvalidGraph(f"op {op.name!r} makes {v!r}, which is resident")
                producer.setdefault(v, []).append(i)
            for read, written in op.overwrites:
                sizes = [self._value_by_name[v].size_bytes for v in (read, written)]
                if read in self.resident or sizes[0] != sizes[1]:
                    raise InvalidGraph(
                        f"op {op.name!r} makes {written!r} of {sizes[1]} bytes in the place of "
                        f"{read!r}, which {'is resident' if read in self.resident else 'has'} "
                        f"{sizes[0]} bytes; only a buffer of the same size that can be freed can "
                        f"be overwritten"
                    )
            for earlier in op.order_after:
                if self._op_index.get(earlier, i) >= i:
                    raise InvalidGraph(
                        f"op {op.name!r} is to come after {earlier!r}, which is not an earlier op"
                    )
        return producer, consumers

    def _check_sets(self) -> None:
        for kind, names in (("resident", self.resident), ("a result", self.results)):
            unknown = sorted(names - self._value_by_name.keys())
            if unknown:
                raise InvalidGraph(
                    f"{unknown[0]!r} is declared {kind} but is no value of the graph"
                )
        for v in self._value_by_name:
            if v not in self._producer and v not in self.resident:
                raise InvalidGraph(f"value {v!r} is made by no op and is not resident")

    def _check_stages(self) -> None:
        first_backward = (
            len(self.ops) if self.boundary is None else self._op_index.get(self.boundary)
        )
        if first_backward is None:
            raise InvalidGraph(f"boundary {self.boundary!r} is no op of the graph")
        for i, op in enumerate(self.ops):
            expected = Stage.FORWARD if i < first_backward else Stage.BACKWARD
            if op.stage is not expected:
                raise InvalidGraph(
                    f"op {op.name!r} at {i} is {op.stage.value}, but with boundary "
                    f"{self.boundary!r} at {first_backward} it must be {expected.value}"
                )
            if op.twin is not None:
                twin = self._op_index.get(op.twin)
                if twin is None or twin >= first_backward or op.stage is Stage.FORWARD:
                    raise InvalidGraph(
                        f"op {op.name!r} has twin {op.twin!r}; "
                        f"only a backward op has one, and it must be a forward op"
                    )

    def _check_alternatives(self) -> None:
        for op in self.ops:
            if op.alternative_of is not None:
                at = self._op_index.get(op.alternative_of, self._op_index[op.name])
                of = self.ops[at]
                if at >= self._op_index[op.name] or not of.owed or op.optional:
                    raise InvalidGraph(
                        f"op {op.name!r} is to be an alternative of {op.alternative_of!r}; that "
                        f"must be an earlier op which is owed, and it cannot be optional itself"
                    )
                if not op.outputs or not set(op.outputs) <= set(of.outputs):
                    raise InvalidGraph(
                        f"op {op.name!r} makes {op.outputs}, but {of.name!r}, of which it is an "
                        f"alternative, {of.outputs}; it must make some of these and nothing else"
                    )
                if op.stage is not of.stage and op.stage is Stage.FORWARD:
                    raise InvalidGraph(f"op {op.name!r} is forward, {of.name!r} is not")
                if not of.replayable and op.replayable:
                    raise InvalidGraph(
                        f"op {op.name!r} may run again, but {of.name!r}, of which it is an "
                        f"alternative, may not"
                    )
            elif not op.optional:
                for v in op.inputs:
                    if v in self._producer and self.ops[self._producer[v]].optional:
                        raise InvalidGraph(f"op {op.name!r} is owed, but reads {v!r}, which is not")
        for v in self.results - self.resident:
            if self.ops[self._producer[v]].optional:
                raise InvalidGraph(f"{v!r} is a result, but its producer is optional")

    @property
    def value_by_name(self) -> Mapping[str, Value]:
        """Values by their name."""
        return MappingProxyType(self._value_by_name)

    @property
    def op_index(self) -> Mapping[str, int]:
        """Position in `ops` by the name of the op."""
        return MappingProxyType(self._op_index)

    @property
    def producer(self) -> Mapping[str, int]:
        """Position of the op that makes a value; resident values are absent."""
        return MappingProxyType(self._producer)

    @property
    def makers(self) -> Mapping[str, tuple[int, ...]]:
        """Positions of the ops that make a value, its producer first; without resident values."""
        return MappingProxyType(self._makers)

    @property
    def has_alternatives(self) -> bool:
        """Whether there is anything that need not run."""
        return self._has_alternatives

    def with_numerics(self, numerics: Numerics) -> Graph:
        """Leave out what is less exact than this."""
        return self._with_ops(lambda op: op.owed or numerics.allows(op.numerics))

    def without_alternatives(self) -> Graph:
        """Leave out what need not run."""
        return self._with_ops(lambda op: op.owed)

    def _with_ops(self, wanted: Callable[[Op], bool]) -> Graph:
        """Keep some ops, those owed among them, of the others those whose inputs are made."""
        available = set(self.resident)
        ops: list[Op] = []
        for op in self.ops:
            if wanted(op) and available.issuperset(op.inputs):
                ops.append(op)
                available.update(op.outputs)
        if len(ops) == len(self.ops):
            return self
        values = tuple(v for v in self.values if v.name in available)
        return Graph(values, tuple(ops), self.resident, self.results, self.boundary)

    @property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """Positions of the ops that read a value, in execution order."""
        return MappingProxyType(self._consumers)

    @property
    def boundary_index(self) -> int:
        """Position of the first backward op, or the number of ops if there is none."""
        return len(self.ops) if self.boundary is None else self._op_index[self.boundary]

    @property
    def time(self) -> float:
        """Time of computing every op once, those that need not run left out.

        Without alternatives, the least that a schedule of all ops can take.
        """
        return math.fsum(op.time for op in self.ops if op.owed)

    @property
    def least_time(self) -> float | None:
        """A time that no schedule of all ops can beat; `None` where alternatives may be faster."""
        return None if self.has_alternatives else self.time


def _check_bytes(owner: str, field_name: str, count: int) -> None:
    if not isinstance(count, int) or count < 0:
        raise InvalidGraph(f"{owner} has {field_name}={count!r}; it must be an int, 0 or more")


def _unique(kind: str, items: Iterable[tuple[str, T]]) -> dict[str, T]:
    by_name: dict[str, T] = {}
    for name, item in items:
        if name in by_name:
            raise InvalidGraph(f"two {kind}s are called {name!r}; names must be unique")
        by_name[name] = item
    return by_name
