"""Plans as files: JSON with a schema version, canonical bytes, written atomically.

A document of kind `plan` holds its graph and its solution as documents of their own, as
`remat_graph.encode` writes them. A file is data: its names serve to tell what differs, and reach
neither generated code nor a path; what it says of peak and time is computed again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from remat.origin import Origin
from remat.outlines import Outline
from remat_graph import (
    DocumentError,
    Graph,
    GraphError,
    Solution,
    decode,
    encode,
    simulate,
)

if TYPE_CHECKING:
    from remat.plans import Plan

__all__ = [
    "PlanHead",
    "encode_plan",
    "is_plan",
    "read_head",
    "read_plan",
]

_VERSION = 1

Body = TypeVar("Body")

_Size = Annotated[int, msgspec.Meta(ge=0)]
_Word = Annotated[str, msgspec.Meta(max_length=200)]


class _Origin(msgspec.Struct, forbid_unknown_fields=True):
    remat_version: _Word
    torch_version: _Word
    device: _Word


class PlanHead(msgspec.Struct):
    """What a plan is looked for by: the hash of the outline of its graph, and its budget."""

    outline: str
    budget_bytes: _Size


class _Plan(msgspec.Struct, forbid_unknown_fields=True):
    outline: str
    graph: msgspec.Raw
    solution: msgspec.Raw
    budget_bytes: _Size
    plain_peak_bytes: _Size | None
    store_all_peak_bytes: _Size
    measured_peak_bytes: _Size | None
    predicted_peak_bytes: _Size
    capture_seconds: float
    missing: list[_Size]
    let_go: list[_Size]
    origin: _Origin


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    version: int
    body: msgspec.Raw


# What msgspec raises for damaged input; the last two are no subclasses of its own error.
_DAMAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode_plan(plan: Plan) -> bytes:
    """Encode a plan without its generated code: equal plans give equal bytes."""
    origin = plan.origin
    body = _Plan(
        Outline.of(plan.graph).hash,
        msgspec.Raw(encode(plan.graph).strip()),
        msgspec.Raw(encode(plan.solution).strip()),
        plan.budget_bytes,
        plan.plain_peak_bytes,
        plan.store_all_peak_bytes,
        plan.measured_peak_bytes,
        plan.predicted_peak_bytes,
        plan.capture_seconds,
        sorted(plan.missing),
        sorted(plan.let_go),
        _Origin(origin.remat_version, origin.torch_version, origin.device),
    )
    return _dump(_Envelope("plan", _VERSION, msgspec.Raw(_dump(body)))) + b"\n"


def is_plan(data: bytes) -> bool:
    """Whether this says of itself that it is a plan, of whatever version."""
    try:
        return msgspec.json.decode(data, type=_Envelope).kind == "plan"
    except _DAMAGE:
        return False


def read_plan(data: bytes, *, source: str = "document") -> dict[str, Any]:
    """Read the fields of a `Plan` that `encode_plan` wrote; `source` names it in errors.

    Raises:
        DocumentError: if the JSON is damaged, of another kind or schema version, a field is missing
            or of the wrong type, or the schedule is none of the graph.
    """
    body = _body(data, _Plan, source)
    graph = _part(body.graph, Graph, f"the graph of {source}")
    solution = _part(body.solution, Solution, f"the solution of {source}")
    try:
        return _made(graph, solution, body)
    except GraphError as error:
        raise DocumentError(f"{source} holds an invalid plan: {error}") from error


def read_head(data: bytes, *, source: str = "document") -> PlanHead:
    """Read of a plan what it is looked for by, without checking the rest.

    Raises:
        DocumentError: as `read_plan`.
    """
    return _body(data, PlanHead, source)


def _body(data: bytes, kind: type[Body], source: str) -> Body:
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if envelope.kind != "plan":
            raise DocumentError(f"{source} is of kind {envelope.kind!r}; a plan is needed")
        if envelope.version != _VERSION:
            raise DocumentError(
                f"{source} is a plan of schema version {envelope.version}; this remat reads "
                f"version {_VERSION}. Plan again, or install the remat that wrote it"
            )
        return msgspec.json.decode(bytes(envelope.body), type=kind)
    except _DAMAGE as error:
        raise DocumentError(f"{source} is no plan, or a damaged one: {error}") from error


def _part(raw: msgspec.Raw, kind: type[Any], source: str) -> Any:
    found = decode(bytes(raw), source=source)
    if not isinstance(found, kind):
        raise DocumentError(f"{source} is of kind {type(found).__name__.lower()!r}")
    return found


def _made(graph: Graph, solution: Solution, body: _Plan) -> dict[str, Any]:
    if solution.schedule is None:
        raise GraphError("its solution has no schedule")
    if Outline.of(graph).hash != body.outline:
        raise GraphError("the hash of its outline is not that of its graph")
    timeline = simulate(graph, solution.schedule)
    return {
        "graph": graph,
        "solution": replace(solution, time=timeline.time, peak_bytes=timeline.peak_bytes),
        "budget_bytes": body.budget_bytes,
        "plain_peak_bytes": body.plain_peak_bytes,
        "store_all_peak_bytes": body.store_all_peak_bytes,
        "measured_peak_bytes": body.measured_peak_bytes,
        "capture_seconds": body.capture_seconds,
        "predicted_peak_bytes": body.predicted_peak_bytes,
        "source": "",
        "origin": Origin(body.origin.remat_version, body.origin.torch_version, body.origin.device),
        "missing": frozenset(body.missing),
        "let_go": frozenset(body.let_go),
    }


def _dump(item: Any) -> bytes:
    return msgspec.json.encode(item, order="deterministic")
