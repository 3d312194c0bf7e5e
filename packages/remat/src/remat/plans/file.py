"""Plans as files: JSON with a schema version, canonical bytes, written atomically.

There are two kinds: `plan`, of one graph, which is read and written here, and `step plan`, of a
step of several regions (`step_file.py`). A document of kind `plan` holds its graph and its solution
as documents of their own, as `remat_graph.encode` writes them. A file is data: its names serve to
tell what differs, and reach neither generated code nor a path. What it says of peak and time is
computed again, and a file that says something else is refused; what it says was proved must not
contradict them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from remat.plans.origin import Origin
from remat.plans.outlines import Outline
from remat_graph import (
    DocumentError,
    Graph,
    GraphError,
    Solution,
    decode,
    encode,
    simulate,
)
from remat_solvers import store_all

if TYPE_CHECKING:
    from remat.plans.plan import Plan

__all__ = [
    "PLAN",
    "STEP_PLAN",
    "OriginBody",
    "PlanHead",
    "Size",
    "dump",
    "encode_plan",
    "kind_of",
    "read_body",
    "read_head",
    "read_part",
    "read_plan",
    "seal",
]

PLAN, STEP_PLAN = "plan", "step plan"
_VERSION = 1
_CLOSE = 1e-6  # of a time, within which two are the same

Body = TypeVar("Body")

Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Word = Annotated[str, msgspec.Meta(max_length=200)]


class OriginBody(msgspec.Struct, forbid_unknown_fields=True):
    """With what a plan was made, as it is written."""

    remat_version: _Word
    torch_version: _Word
    device: _Word

    @classmethod
    def of(cls, origin: Origin) -> OriginBody:
        """Write it."""
        return cls(origin.remat_version, origin.torch_version, origin.device)

    def read(self) -> Origin:
        """Read it."""
        return Origin(self.remat_version, self.torch_version, self.device)


class PlanHead(msgspec.Struct):
    """What a plan is looked for by: the hash of the outline of its graph, and its budget."""

    outline: str
    budget_bytes: Size


class _Plan(msgspec.Struct, forbid_unknown_fields=True):
    outline: str
    graph: msgspec.Raw
    solution: msgspec.Raw
    budget_bytes: Size
    plain_peak_bytes: Size | None
    store_all_peak_bytes: Size
    measured_peak_bytes: Size | None
    predicted_peak_bytes: Size
    capture_seconds: float
    missing: list[Size]
    released_outputs: list[Size] = msgspec.field(name="let_go")
    origin: OriginBody
    laid_out: list[Size] = []


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    version: int
    body: msgspec.Raw


# What msgspec raises for damaged input; the last two are no subclasses of its own error.
_DAMAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode_plan(plan: Plan) -> bytes:
    """Encode a plan without its generated code: equal plans give equal bytes."""
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
        sorted(plan.released_outputs),
        OriginBody.of(plan.origin),
        list(plan.laid_out),
    )
    return seal(PLAN, body)


def seal(kind: str, body: Any) -> bytes:
    """Write a document of this kind: equal bodies give equal bytes."""
    return dump(_Envelope(kind, _VERSION, msgspec.Raw(dump(body)))) + b"\n"


def kind_of(data: bytes) -> str | None:
    """Say what this says of itself that it is, of whatever version; `None` if it says nothing."""
    try:
        return msgspec.json.decode(data, type=_Envelope).kind
    except _DAMAGE:
        return None


def read_plan(data: bytes, *, source: str = "document") -> dict[str, Any]:
    """Read the fields of a `Plan` that `encode_plan` wrote; `source` names it in errors.

    Raises:
        DocumentError: if the JSON is damaged, of another kind or schema version, a field is missing
            or of the wrong type, or the schedule is none of the graph.
    """
    body = read_body(data, PLAN, _Plan, source)
    graph = read_part(body.graph, Graph, f"the graph of {source}")
    solution = read_part(body.solution, Solution, f"the solution of {source}")
    try:
        return _made(graph, solution, body)
    except GraphError as error:
        raise DocumentError(f"{source} holds an invalid plan: {error}") from error


def read_head(data: bytes, *, source: str = "document") -> PlanHead:
    """Read of a plan what it is looked for by, without checking the rest.

    Raises:
        DocumentError: as `read_plan`.
    """
    return read_body(data, PLAN, PlanHead, source)


def read_body(data: bytes, kind: str, body: type[Body], source: str) -> Body:
    """Read the body of a document that must be of this kind.

    Raises:
        DocumentError: if it is damaged, of another kind or schema version.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if envelope.kind != kind:
            raise DocumentError(f"{source} is of kind {envelope.kind[:60]!r}; a {kind} is needed")
        if envelope.version != _VERSION:
            raise DocumentError(
                f"{source} is a plan of schema version {envelope.version}; this remat reads "
                f"version {_VERSION}. Plan again, or install the remat that wrote it"
            )
        return msgspec.json.decode(bytes(envelope.body), type=body)
    except _DAMAGE as error:
        raise DocumentError(f"{source} is no plan, or a damaged one: {error}") from error


def read_part(raw: msgspec.Raw, kind: type[Any], source: str) -> Any:
    """Read a document within a document.

    Raises:
        DocumentError: if it is damaged, or holds something else.
    """
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
    solution = replace(solution, time=timeline.time, peak_bytes=timeline.peak_bytes)
    everything = simulate(graph, store_all(graph)).peak_bytes
    for what, said, found in (
        ("its schedule", body.predicted_peak_bytes, timeline.peak_bytes),
        ("storing everything", body.store_all_peak_bytes, everything),
    ):
        if said != found:
            raise GraphError(f"the peak of {what} is {found:,} bytes, where it says {said:,}")
    bound = solution.lower_bound
    if bound is not None and bound > timeline.time * (1 + _CLOSE):
        raise GraphError(f"it takes {timeline.time} s, less than its bound, {bound} s")
    return {
        "graph": graph,
        "solution": solution,
        "budget_bytes": body.budget_bytes,
        "plain_peak_bytes": body.plain_peak_bytes,
        "store_all_peak_bytes": everything,
        "measured_peak_bytes": body.measured_peak_bytes,
        "capture_seconds": body.capture_seconds,
        "predicted_peak_bytes": timeline.peak_bytes,
        "source": "",
        "origin": body.origin.read(),
        "missing": frozenset(body.missing),
        "released_outputs": frozenset(body.released_outputs),
        "laid_out": tuple(body.laid_out),
    }


def dump(item: Any) -> bytes:
    """Write JSON: equal items give equal bytes."""
    return msgspec.json.encode(item, order="deterministic")
