"""Why a frame runs as it is, or its graph ends, in words for who reads a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch._dynamo.exc import TorchRuntimeError

__all__ = ["ended_by", "failure", "first_lines", "is_in_loop"]

_IN_LOOP, _AND = "graph break in loop", "*** While handling this graph break"


def is_in_loop(unsupported: str) -> bool:
    """Whether Dynamo says that a frame is left alone for a break in a loop."""
    return _IN_LOOP in unsupported


def failure(error: Exception) -> str:
    """Say what an error is by which a frame has no graph."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, TorchRuntimeError):
        return first_line
    if isinstance(error, AssertionError):  # those of Dynamo's own say their kind
        first_line = f"AssertionError: {first_line}"
    return f"TorchDynamo fails to make a graph of it ({first_line.rstrip(': ')})"


def ended_by(unsupported: Iterable[str]) -> str | None:
    """Say what ended a frame, if that is known: what breaks its graph, and if that is in a loop."""
    found = list(unsupported)
    found = [reason for reason in found if is_in_loop(reason)] or found
    if len(found) != 1:
        return None
    what = first_lines(found[0].partition(_AND)[0])
    return f"a graph break in a loop: {what}" if is_in_loop(found[0]) else what


def first_lines(reason: str) -> str:
    """Give what Dynamo says of a break: its kind and the explanation, without hints and links."""
    kind, _, rest = reason.partition("\n")
    explanation = re.split(r"\n  Hint:|\n\n", rest.partition("Explanation: ")[2])[0]
    return " ".join(f"{kind}. {explanation}".split()) if explanation else kind
