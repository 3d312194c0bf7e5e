"""TorchDynamo as a front door: the graphs of a function, and what runs instead of them."""

from remat.dynamo.found import (
    Found,
    compiled_call,
    found_in,
    frame_of_call,
    is_last_compilation,
    let_through,
)
from remat.dynamo.frames import compile_frames, loses_dropout
from remat.dynamo.watching import watch_calls

__all__ = [
    "Found",
    "compile_frames",
    "compiled_call",
    "found_in",
    "frame_of_call",
    "is_last_compilation",
    "let_through",
    "loses_dropout",
    "watch_calls",
]
