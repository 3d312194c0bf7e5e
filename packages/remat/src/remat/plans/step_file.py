"""Plans of steps of several regions as files: documents of kind `step plan`.

A region is there once, with its graph, all of its options, and what was proved; a call is a name
and two positions. What a step was like is there as the moments that it was planned by. Peaks and
times are computed again when it is read; names tell what differs, and are looked up, but reach
neither generated code nor a path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from remat.budgets.plain_step import Basis
from remat.plans.file import (
    STEP_PLAN,
    OriginBody,
    Size,
    read_body,
    read_part,
    seal,
)
from remat.plans.outlines import Outline
from remat_graph import DocumentError, Graph, GraphError, Schedule, encode
from remat_solvers import SolverError
from remat_solvers.step import Moment, RegionBound, RegionFront, measure_option

if TYPE_CHECKING:
    from remat.plans.step import RegionOfStep, StepPlan

__all__ = ["encode_step", "read_step"]

_CLOSE = 1e-9  # of a time, within which two are the same

_Region = TypeVar("_Region")
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(max_length=500)]


class _Option(msgspec.Struct, forbid_unknown_fields=True):
    schedule: msgspec.Raw
    lower_bound: _Seconds | None


class _Bound(msgspec.Struct, forbid_unknown_fields=True):
    kept_bytes: Size
    peak_bytes: Size
    time: _Seconds | None  # none where nothing fits


class _Kind(msgspec.Struct, forbid_unknown_fields=True):
    outline: str
    graph: msgspec.Raw
    options: Annotated[list[_Option], msgspec.Meta(min_length=1)]
    bounds: list[_Bound]
    least_kept_bytes: Size
    least_forward_bytes: Size
    least_backward_bytes: Size
    missing: list[Size]


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name
    kind: Size
    option: Size


class _Moment(msgspec.Struct, forbid_unknown_fields=True):
    fixed_bytes: Size
    live: list[Size]
    running: tuple[Size, Literal["forward", "backward"]] | None


class _Step(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    kinds: Annotated[list[_Kind], msgspec.Meta(min_length=1)]
    calls: Annotated[list[_Call], msgspec.Meta(min_length=1)]
    moments: Annotated[list[_Moment], msgspec.Meta(min_length=1)]
    breaks: list[str]
    budget_bytes: Size
    set_aside_bytes: Size
    lower_bound: _Seconds
    measured_peak_bytes: Size | None
    origin: OriginBody
    doubt: str | None = None
    plain_peak_bytes: Size | None = None
    plain_basis: Basis = "measured"


def encode_step(plan: StepPlan) -> bytes:
    """Encode a plan of a step: equal plans give equal bytes."""
    chosen = zip(plan.calls, plan.chosen, strict=True)
    return seal(
        STEP_PLAN,
        _Step(
            [_write_kind(kind) for kind in plan.kinds],
            [_Call(name[:500], kind, option) for (name, kind), option in chosen],
            [
                _Moment(moment.fixed_bytes, [call for call, _ in moment.live], moment.running)
                for moment in plan.moments
            ],
            list(plan.breaks),
            plan.budget_bytes,
            plan.set_aside_bytes,
            plan.lower_bound,
            plan.measured_peak_bytes,
            OriginBody.of(plan.origin),
            plan.doubt,
            plan.plain_peak_bytes,
            plan.plain_basis,
        ),
    )


def _write_kind(kind: RegionOfStep) -> _Kind:
    front = kind.front
    return _Kind(
        Outline.of(front.graph).hash,
        msgspec.Raw(encode(front.graph).strip()),
        [
            _Option(msgspec.Raw(encode(option.schedule).strip()), option.lower_bound)
            for option in front.options
        ],
        [
            _Bound(b.kept_bytes, b.peak_bytes, None if math.isinf(b.time) else b.time)
            for b in front.bounds
        ],
        front.least_kept_bytes,
        front.least_forward_bytes,
        front.least_backward_bytes,
        sorted(kind.missing),
    )


def read_step(
    data: bytes,
    region: Callable[[RegionFront, frozenset[int]], _Region],
    *,
    source: str = "document",
) -> dict[str, Any]:
    """Read the fields of a `StepPlan` that `encode_step` wrote; `source` names it in errors.

    Raises:
        DocumentError: if the JSON is damaged, of another kind or schema version, a field is missing
            or of the wrong type, a schedule is none of its graph, or a call names no option.
    """
    body = read_body(data, STEP_PLAN, _Step, source)
    try:
        kinds = [_read_kind(kind, f"region {at} of {source}") for at, kind in enumerate(body.kinds)]
        for at, call in enumerate(body.calls):
            if call.kind >= len(kinds) or call.option >= len(kinds[call.kind].options):
                raise GraphError(f"call {at} is of no option")
        moments = tuple(_read_moment(moment, len(body.calls)) for moment in body.moments)
        time = sum(kinds[call.kind].options[call.option].time for call in body.calls)
        if body.lower_bound > time * (1 + _CLOSE):
            raise GraphError("its bound is above its time")
    except (GraphError, SolverError) as error:
        raise DocumentError(f"{source} holds an invalid plan: {error}") from error
    return {
        "calls": tuple((call.name, call.kind) for call in body.calls),
        "kinds": tuple(
            region(front, frozenset(kind.missing))
            for front, kind in zip(kinds, body.kinds, strict=True)
        ),
        "chosen": tuple(call.option for call in body.calls),
        "moments": moments,
        "breaks": tuple(body.breaks),
        "budget_bytes": body.budget_bytes,
        "lower_bound": body.lower_bound,
        "origin": body.origin.read(),
        "set_aside_bytes": body.set_aside_bytes,
        "measured_peak_bytes": body.measured_peak_bytes,
        "doubt": body.doubt,
        "plain_peak_bytes": body.plain_peak_bytes,
        "plain_basis": body.plain_basis,
    }


def _read_kind(kind: _Kind, source: str) -> RegionFront:
    graph: Graph = read_part(kind.graph, Graph, f"the graph of {source}")
    if Outline.of(graph).hash != kind.outline:
        raise GraphError(f"the hash of the outline of {source} is not that of its graph")
    options = []
    for option in kind.options:
        schedule = read_part(option.schedule, Schedule, f"a schedule of {source}")
        made = measure_option(graph, schedule, lower_bound=option.lower_bound)
        if made.lower_bound is not None and made.lower_bound > made.time * (1 + _CLOSE):
            raise GraphError(f"a bound of {source} is above its time")
        options.append(made)
    bounds = (
        RegionBound(b.kept_bytes, b.peak_bytes, math.inf if b.time is None else b.time)
        for b in kind.bounds
    )
    return RegionFront(
        graph, tuple(options), tuple(bounds),
        kind.least_kept_bytes, kind.least_forward_bytes, kind.least_backward_bytes,
    )  # fmt: skip


def _read_moment(moment: _Moment, calls: int) -> Moment:
    named = [*moment.live, *(() if moment.running is None else moment.running[:1])]
    if len(set(named)) != len(named) or any(call >= calls for call in named):
        raise GraphError("a moment names a call that there is not, or one twice")
    return Moment(moment.fixed_bytes, tuple((call, 1) for call in moment.live), moment.running)
