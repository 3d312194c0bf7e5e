"""Graphs and schedules as JSON documents with a schema version.

A document is `{"kind": ..., "version": 3, "body": ...}` with canonical bytes: equal objects give
equal files. Older versions are read, too: 2 has no `provenance`, 1 besides
no `overwrites` and no alternatives. Writing is atomic; a damaged file is refused with the field at
fault.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from remat_graph.block import Block
from remat_graph.errors import DocumentError, GraphError
from remat_graph.files import write_atomically
from remat_graph.graph import Graph, Numerics, Op, Stage, Value
from remat_graph.hierarchy import Hierarchy
from remat_graph.provenance import Provenance
from remat_graph.schedule import Compute, Free, Schedule, Solution, Status, Trial

__all__ = ["SCHEMA_VERSION", "decode", "encode", "load", "save"]

SCHEMA_VERSION = 3
_READ = (1, 2, SCHEMA_VERSION)

Document = Graph | Schedule | Hierarchy | Solution


class _Value(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    size_bytes: int


class _Op(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    inputs: list[str]
    outputs: list[str]
    time: float
    workspace_bytes: int = 0
    stage: Stage = Stage.FORWARD
    twin: str | None = None
    equivalence: str | None = None
    replayable: bool = True
    order_after: list[str] = []
    overwrites: list[tuple[str, str]] = []
    alternative_of: str | None = None
    optional: bool = False
    numerics: Numerics = Numerics.BITWISE
    provenance: tuple[str, str] | None = None


class _Graph(msgspec.Struct, forbid_unknown_fields=True):
    values: list[_Value]
    ops: list[_Op]
    resident: list[str]
    results: list[str]
    boundary: str | None


class _Schedule(msgspec.Struct, forbid_unknown_fields=True):
    steps: list[tuple[Literal["compute", "free"], str]]


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    members: list[str | _Block]


class _Hierarchy(msgspec.Struct, forbid_unknown_fields=True):
    graph: _Graph
    root: _Block


class _Trial(msgspec.Struct, forbid_unknown_fields=True):
    solver: str
    status: Status
    time: float | None
    peak_bytes: int
    lower_bound: float | None
    seconds: float


class _Solution(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    status: Status
    schedule: _Schedule | None
    time: float
    peak_bytes: int
    lower_bound: float | None
    solver: str
    solve_seconds: float
    trials: list[_Trial] = []
    doubt: str | None = None


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    version: int
    body: msgspec.Raw


# What msgspec raises for damaged input; the last two are no subclasses of its own error.
_DAMAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_TOLERANCE = 1e-6  # of a time, within which two are the same

_BODIES: dict[str, type[Any]] = {
    "graph": _Graph,
    "schedule": _Schedule,
    "hierarchy": _Hierarchy,
    "solution": _Solution,
}


def encode(item: Document) -> bytes:
    """Encode as canonical JSON: equal objects give equal bytes.

    Raises:
        DocumentError: if `item` is of another type, or a figure of a solution is not finite, or its
            status or bound contradicts its schedule or time.
    """
    kind, body = _to_body(item)
    envelope = _Envelope(kind, SCHEMA_VERSION, msgspec.Raw(_dump(body)))
    return _dump(envelope) + b"\n"


def decode(data: bytes, *, source: str = "document") -> Document:
    """Decode what `encode` made; `source` names it in errors.

    Raises:
        DocumentError: if the JSON is damaged, a field is missing or of the wrong type, the kind or
            schema version is unknown, or the content breaks a rule of its type.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except _DAMAGE as error:
        raise DocumentError(f"{source} is not a remat document: {error}") from error
    if envelope.version not in _READ:
        raise DocumentError(
            f"{source} has schema version {envelope.version}; this remat-graph reads versions "
            f"{_READ[0]} to {_READ[-1]}. Make the file again, or install the remat-graph that "
            f"wrote it"
        )
    body_type = _BODIES.get(envelope.kind)
    if body_type is None:
        raise DocumentError(f"{source} is of kind {envelope.kind!r}; known are {sorted(_BODIES)}")
    try:
        return _from_body(msgspec.json.decode(bytes(envelope.body), type=body_type))
    except _DAMAGE as error:
        message = str(error).replace("`$", "`$.body")
        raise DocumentError(f"{source} is a damaged {envelope.kind}: {message}") from error
    except GraphError as error:
        raise DocumentError(f"{source} holds an invalid {envelope.kind}: {error}") from error


def save(item: Document, path: str | os.PathLike[str]) -> None:
    """Write a document atomically: a reader sees the old file or the whole new one.

    Raises:
        DocumentError: as `encode`.
        OSError: if the folder does not exist or cannot be written.
    """
    write_atomically(path, encode(item))


def load(path: str | os.PathLike[str]) -> Document:
    """Read what `save` wrote.

    Raises:
        DocumentError: as `decode`, naming the file.
        OSError: if the file cannot be read.
    """
    return decode(Path(path).read_bytes(), source=str(path))


def _dump(item: Any) -> bytes:
    return msgspec.json.encode(item, order="deterministic")


def _to_body(item: Document) -> tuple[str, Any]:
    match item:
        case Graph():
            return "graph", _graph_body(item)
        case Schedule():
            return "schedule", _schedule_body(item)
        case Hierarchy():
            return "hierarchy", _Hierarchy(_graph_body(item.graph), _block_body(item.root))
        case Solution():
            schedule = None if item.schedule is None else _schedule_body(item.schedule)
            body = _Solution(
                item.status, schedule, _finite("time", item.time), item.peak_bytes,
                _finite_or_none("lower_bound", item.lower_bound), item.solver,
                _finite("solve_seconds", item.solve_seconds), [_trial(t) for t in item.trials],
                item.doubt,
            )  # fmt: skip
            _consistent(item)
            return "solution", body
    raise DocumentError(
        f"cannot write a {type(item).__name__}; a Graph, Schedule, Hierarchy or Solution can be"
    )


def _trial(trial: Trial) -> _Trial:
    return _Trial(
        trial.solver, trial.status, _finite_or_none("time", trial.time), trial.peak_bytes,
        _finite_or_none("lower_bound", trial.lower_bound), _finite("seconds", trial.seconds),
    )  # fmt: skip


def _finite_or_none(field: str, number: float | None) -> float | None:
    return None if number is None else _finite(field, number)


def _finite(field: str, number: float) -> float:
    if not math.isfinite(number):
        raise DocumentError(f"cannot write a solution whose {field} is {number}; JSON has no such")
    return float(number) + 0.0


def _from_body(body: Any) -> Document:
    match body:
        case _Graph():
            return _read_graph(body)
        case _Schedule():
            return _read_schedule(body)
        case _Hierarchy():
            return Hierarchy(_read_graph(body.graph), _read_block(body.root))
    schedule = None if body.schedule is None else _read_schedule(body.schedule)
    return _consistent(Solution(
        body.status, schedule, body.time, body.peak_bytes,
        body.lower_bound, body.solver, body.solve_seconds,
        tuple(
            Trial(t.solver, t.status, t.time, t.peak_bytes, t.lower_bound, t.seconds)
            for t in body.trials
        ),
        body.doubt,
    ))  # fmt: skip


def _consistent(solution: Solution) -> Solution:
    """Give a solution whose status and bound contradict neither its schedule nor its time."""
    has_schedule = solution.schedule is not None
    if has_schedule != (solution.status in {Status.OPTIMAL, Status.FEASIBLE}):
        what = "a schedule" if has_schedule else "no schedule"
        raise DocumentError(f"a solution that is {solution.status.value} has {what}")
    bound = solution.lower_bound
    if has_schedule and bound is not None and bound > solution.time * (1 + _TOLERANCE):
        raise DocumentError(f"a solution takes {solution.time} s, less than its bound, {bound} s")
    return solution


def _graph_body(graph: Graph) -> _Graph:
    return _Graph(
        values=[_Value(v.name, v.size_bytes) for v in graph.values],
        ops=[
            _Op(
                op.name, list(op.inputs), list(op.outputs), op.time, op.workspace_bytes, op.stage,
                op.twin, op.equivalence, op.replayable, list(op.order_after),
                list(op.overwrites), op.alternative_of, op.optional, op.numerics,
                _place(op.provenance),
            )
            for op in graph.ops
        ],
        resident=sorted(graph.resident),
        results=sorted(graph.results),
        boundary=graph.boundary,
    )  # fmt: skip


def _place(provenance: Provenance | None) -> tuple[str, str] | None:
    return None if provenance is None else (provenance.module, provenance.source)


def _read_graph(body: _Graph) -> Graph:
    return Graph(
        values=tuple(Value(v.name, v.size_bytes) for v in body.values),
        ops=tuple(
            Op(
                op.name, tuple(op.inputs), tuple(op.outputs), op.time, op.workspace_bytes, op.stage,
                op.twin, op.equivalence, op.replayable, tuple(op.order_after),
                tuple(op.overwrites), op.alternative_of, op.optional, op.numerics,
                None if op.provenance is None else Provenance(*op.provenance),
            )
            for op in body.ops
        ),
        resident=frozenset(body.resident),
        results=frozenset(body.results),
        boundary=body.boundary,
    )  # fmt: skip


def _schedule_body(schedule: Schedule) -> _Schedule:
    return _Schedule(
        [("compute", s.op) if isinstance(s, Compute) else ("free", s.value) for s in schedule.steps]
    )


def _read_schedule(body: _Schedule) -> Schedule:
    return Schedule(
        tuple(Compute(name) if verb == "compute" else Free(name) for verb, name in body.steps)
    )


def _block_body(block: Block) -> _Block:
    return _Block(
        block.name, [_block_body(m) if isinstance(m, Block) else m for m in block.members]
    )


def _read_block(body: _Block) -> Block:
    return Block(
        body.name,
        tuple(_read_block(m) if isinstance(m, _Block) else m for m in body.members),
    )
