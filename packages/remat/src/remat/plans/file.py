"""Plans as files: JSON with a schema version, canonical bytes.

A region is there once, with its graph, all of its options, and what was proved; a call is a name
and two positions. Graphs and schedules are documents of their own, as `remat_graph.encode` writes
them. What a step was like is there as the moments that it was planned by; there are none where one
region is all of the step.

A file is data: its names serve to tell what differs, and reach neither generated code nor a path.
What it says of peaks is computed again, and a file that says something else is refused; what it
says was proved must not contradict them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

import msgspec

from remat.budgets.plain_step import Basis
from remat.plans.origin import Origin
from remat.plans.outlines import Outline
from remat.plans.regions import PlannedRegion, lone_option
from remat_graph import DocumentError, Graph, GraphError, Schedule, Status, Trial, decode, encode
from remat_solvers.step import RegionBound, RegionFront, TimeStep, measure_option

__all__ = [
    "CLOSE",
    "PlanBody",
    "check_moment",
    "encode_body",
    "is_plan",
    "read_body",
    "read_lone_head",
    "read_region",
    "write_region",
]

CLOSE = 1e-6  # of a time, within which two are the same
_KIND, _OLD_KIND = "plan", "step plan"
# 5 names no earlier graphs; 4 counts outputs of several regions to the end of each backward, and
# may write over outputs that are let go of; 3 has other hashes of outlines; 2 is 3 without cuts.
_VERSION, _READ, _LETS_GO = 6, (2, 3, 4, 5, 6), 5


_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Slices = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
_Outputs = Annotated[frozenset[_Size], msgspec.Meta(min_length=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(max_length=500)]


class _Option(msgspec.Struct, forbid_unknown_fields=True):
    schedule: msgspec.Raw
    lower_bound: _Seconds | None


class _Bound(msgspec.Struct, forbid_unknown_fields=True):
    kept_bytes: _Size
    peak_bytes: _Size
    time: _Seconds | None  # none where nothing fits


class _Region(msgspec.Struct, forbid_unknown_fields=True):
    outline: str
    graph: msgspec.Raw
    options: Annotated[list[_Option], msgspec.Meta(min_length=1)]
    bounds: list[_Bound]
    least_kept_bytes: _Size
    least_forward_bytes: _Size
    least_backward_bytes: _Size
    missing: frozenset[_Size]
    released_outputs: frozenset[_Size]
    laid_out: tuple[_Size, ...]
    sliced: tuple[tuple[_Size, _Slices], ...] = ()
    deferred: tuple[tuple[_Size, _Size], ...] = ()
    unfused: tuple[_Size, ...] | None = None
    gives_again: bool = False


class PlanBody(msgspec.Struct, forbid_unknown_fields=True):
    """A plan as it is written, all but its version."""

    kinds: Annotated[tuple[_Region, ...], msgspec.Meta(min_length=1)]
    calls: Annotated[tuple[tuple[str, _Size], ...], msgspec.Meta(min_length=1)]
    chosen: tuple[_Size, ...]
    moments: tuple[TimeStep, ...]
    breaks: tuple[str, ...]
    budget_bytes: _Size
    set_aside_bytes: _Size
    predicted_peak_bytes: _Size
    store_all_peak_bytes: _Size
    measured_peak_bytes: _Size | None
    plain_peak_bytes: _Size | None
    plain_basis: Basis
    lower_bound: _Seconds | None
    doubt: str | None
    status: Status
    solver: _Name
    solve_seconds: _Seconds
    trials: tuple[Trial, ...]
    capture_seconds: _Seconds
    origin: Origin
    whole_time: _Seconds | None = None
    cuts: tuple[tuple[str, _Outputs], ...] = ()
    earlier: tuple[_Name, ...] = ()


class _OutlineHead(msgspec.Struct):
    outline: str


class _Head(msgspec.Struct):
    kinds: list[_OutlineHead]
    moments: list[msgspec.Raw]
    budget_bytes: _Size


Body = TypeVar("Body", PlanBody, _Head)
Part = TypeVar("Part", Graph, Schedule)


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    version: int
    body: msgspec.Raw


# What msgspec raises for damaged input; the last two are no subclasses of its own error.
_DAMAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode_body(body: PlanBody) -> bytes:
    """Write a plan: equal bodies give equal bytes."""
    return _dump(_Envelope(_KIND, _VERSION, msgspec.Raw(_dump(body)))) + b"\n"


def is_plan(data: bytes) -> bool:
    """Whether this says of itself that it is a plan, of whatever version."""
    try:
        return msgspec.json.decode(data, type=_Envelope).kind in (_KIND, _OLD_KIND)
    except _DAMAGE:
        return False


def read_body(data: bytes, source: str) -> PlanBody:
    """Read what `encode_body` wrote; `source` names it in errors.

    Raises:
        DocumentError: if it is damaged, or of another kind or schema version.
    """
    return _read(data, PlanBody, source)


def read_lone_head(data: bytes, source: str) -> tuple[str, int] | None:
    """Read of a plan what it is looked for by, without checking the rest.

    These are the hash of the outline of its graph, and its budget in bytes; `None` if it is of
    several regions.

    Raises:
        DocumentError: as `read_body`.
    """
    head = _read(data, _Head, source)
    if head.moments or len(head.kinds) != 1:
        return None
    return head.kinds[0].outline, head.budget_bytes


def _read(data: bytes, body: type[Body], source: str) -> Body:
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if envelope.kind not in (_KIND, _OLD_KIND):
            raise DocumentError(f"{source} is of kind {envelope.kind[:60]!r}; a plan is needed")
        if envelope.kind != _KIND or envelope.version not in _READ:
            raise DocumentError(
                f"{source} is a {envelope.kind} of schema version {envelope.version}; this remat "
                f"reads plans of versions {_READ[0]} to {_READ[-1]}. Plan again, or install the "
                f"remat that wrote it"
            )
        read = msgspec.json.decode(bytes(envelope.body), type=body)
    except _DAMAGE as error:
        raise DocumentError(f"{source} is no plan, or a damaged one: {error}") from error
    lets_go = isinstance(read, PlanBody) and any(kind.released_outputs for kind in read.kinds)
    if (read.moments or lets_go) and envelope.version < _LETS_GO:
        what = "of several regions" if read.moments else "that takes outputs to be let go of,"
        raise DocumentError(
            f"{source} is a plan {what} of schema version {envelope.version}, which counts outputs "
            f"in other ways; this remat reads such plans from version {_LETS_GO} on. Plan again: "
            f"leave plan= out, and save the plan that is made"
        )
    return read


def write_region(region: PlannedRegion) -> _Region:
    """Give a region as the file has it."""
    front = region.front
    return _Region(
        Outline.of(front.graph).hash,
        _part(front.graph),
        [_Option(_part(option.schedule), option.lower_bound) for option in front.options],
        [
            _Bound(b.kept_bytes, b.peak_bytes, None if math.isinf(b.time) else b.time)
            for b in front.bounds
        ],
        front.least_kept_bytes,
        front.least_forward_bytes,
        front.least_backward_bytes,
        region.missing,
        region.released_outputs,
        region.laid_out,
        region.sliced,
        region.deferred,
        region.unfused,
        region.gives_again,
    )


def read_region(region: _Region, source: str, *, alone: bool) -> PlannedRegion:
    """Read a region, and measure its options; `alone` says that it is all of the step.

    Raises:
        DocumentError: if a part of it is damaged.
        GraphError: if a part of it contradicts another.
        SolverError: if its graph is none of a region.
    """
    graph = _read_part(region.graph, Graph, f"the graph of {source}")
    outlines = (Outline.of(graph, as_made=before_4) for before_4 in (False, True))
    if region.outline not in (outline.hash for outline in outlines):
        raise GraphError(f"the hash of the outline of {source} is not that of its graph")
    measure = lone_option if alone else measure_option
    options = []
    for option in region.options:
        schedule = _read_part(option.schedule, Schedule, f"a schedule of {source}")
        measured = measure(graph, schedule, lower_bound=option.lower_bound)
        if option.lower_bound is not None and option.lower_bound > measured.time * (1 + CLOSE):
            raise GraphError(f"a bound of {source} is above its time")
        options.append(measured)
    bounds = (
        RegionBound(b.kept_bytes, b.peak_bytes, math.inf if b.time is None else b.time)
        for b in region.bounds
    )
    front = RegionFront(
        graph, tuple(options), tuple(bounds),
        region.least_kept_bytes, region.least_forward_bytes, region.least_backward_bytes,
    )  # fmt: skip
    return PlannedRegion(
        front, region.missing, region.released_outputs, region.laid_out, region.sliced,
        region.deferred, region.unfused, region.gives_again,
    )  # fmt: skip


def check_moment(moment: TimeStep, calls: int) -> None:
    """Check what a file says of a moment of a step with so many calls.

    Raises:
        GraphError: if it names a call that there is not, or one twice, or bytes that cannot be.
    """
    named = [(call, 1) for call in (() if moment.running is None else moment.running[:1])]
    named += moment.live
    if len(set(named)) != len(named) or not set(named) <= {(call, 1) for call in range(calls)}:
        raise GraphError("a moment names a call that there is not, or one twice")
    if moment.fixed_bytes < 0:
        raise GraphError(f"a moment holds {moment.fixed_bytes} bytes")


def _part(item: Graph | Schedule) -> msgspec.Raw:
    return msgspec.Raw(encode(item).strip())


def _read_part(raw: msgspec.Raw, kind: type[Part], source: str) -> Part:
    """Read a document within a document.

    Raises:
        DocumentError: if it is damaged, or holds something else.
    """
    item = decode(bytes(raw), source=source)
    if not isinstance(item, kind):
        raise DocumentError(f"{source} is of kind {type(item).__name__.lower()!r}")
    return item


def _dump(item: Any) -> bytes:
    return msgspec.json.encode(item, order="deterministic")
