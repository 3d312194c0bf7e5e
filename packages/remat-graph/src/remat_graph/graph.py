"""The training graph: which values each operation reads and makes, what they weigh, what they cost.

A `Graph` is a list of operations in execution order, forward operations first. A `Value` is one
buffer: a tensor together with all its views. Every value has one producer; gradient sums are
operations of their own. These types carry no torch and are what every package meets in.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from remat_graph.errors import InvalidGraph

__all__ = ["Graph", "Op", "Stage", "Value"]

T = TypeVar("T")

_MOST_TIME = 1e100  # so that no sum of times overflows


class Stage(enum.StrEnum):
    """The half of a training step to which an operation belongs."""

    FORWARD = "forward"
    BACKWARD = "backward"


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
        made = [pair[1] for pair in self.overwrites]
        if not (set(read) <= set(self.inputs) and set(made) <= set(self.outputs)):
            raise InvalidGraph(
                f"op {self.name!r} has overwrites={self.overwrites}; each must be a pair of one of "
                f"its inputs {self.inputs} and one of its outputs {self.outputs}"
            )
        if len(set(read)) != len(read) or len(set(made)) != len(made):
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
        InvalidGraph: naming the op or value at fault, if names collide, a value has no producer or
            two, an op reads something made later, a twin is not a forward op, the order of the
            stages contradicts `boundary`, or a value is to overwrite another that is resident or
            has another size.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    resident: frozenset[str] = frozenset()
    results: frozenset[str] = frozenset()
    boundary: str | None = None

    _value_by_name: dict[str, Value] = field(init=False, repr=False, compare=False)
    _op_index: dict[str, int] = field(init=False, repr=False, compare=False)
    _producer: dict[str, int] = field(init=False, repr=False, compare=False)
    _consumers: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "resident", frozenset(self.resident))
        object.__setattr__(self, "results", frozenset(self.results))
        object.__setattr__(
            self, "_value_by_name", _unique("value", ((v.name, v) for v in self.values))
        )
        object.__setattr__(
            self, "_op_index", _unique("op", ((op.name, i) for i, op in enumerate(self.ops)))
        )
        producer, consumers = self._wire()
        object.__setattr__(self, "_producer", producer)
        object.__setattr__(self, "_consumers", {v: tuple(c) for v, c in consumers.items()})
        self._check_sets()
        self._check_stages()

    def __getstate__(self) -> tuple[object, ...]:
        return (self.values, self.ops, self.resident, self.results, self.boundary)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        names = ("values", "ops", "resident", "results", "boundary")
        for name, item in zip(names, state, strict=True):
            object.__setattr__(self, name, item)
        self.__post_init__()

    def _wire(self) -> tuple[dict[str, int], dict[str, list[int]]]:
        producer: dict[str, int] = {}
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
                if v in producer:
                    first = self.ops[producer[v]].name
                    raise InvalidGraph(
                        f"value {v!r} is made by both {first!r} and {op.name!r}; one must suffice"
                    )
                if v in self.resident:
                    raise InvalidGraph(f"op {op.name!r} makes {v!r}, which is resident")
                producer[v] = i
            for read, made in op.overwrites:
                sizes = [self._value_by_name[v].size_bytes for v in (read, made)]
                if read in self.resident or sizes[0] != sizes[1]:
                    raise InvalidGraph(
                        f"op {op.name!r} makes {made!r} of {sizes[1]} bytes in the place of "
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
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """Positions of the ops that read a value, in execution order."""
        return MappingProxyType(self._consumers)

    @property
    def boundary_index(self) -> int:
        """Position of the first backward op, or the number of ops if there is none."""
        return len(self.ops) if self.boundary is None else self._op_index[self.boundary]

    @property
    def time(self) -> float:
        """Time of computing every op once: the least that a schedule of all ops can take."""
        return math.fsum(op.time for op in self.ops)


def _check_bytes(owner: str, field_name: str, count: int) -> None:
    if not isinstance(count, int) or count < 0:
        raise InvalidGraph(f"{owner} has {field_name}={count!r}; it must be an int, 0 or more")


def _unique(kind: str, items: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, item in items:
        if name in found:
            raise InvalidGraph(f"two {kind}s are called {name!r}; names must be unique")
        found[name] = item
    return found
