"""TorchDynamo: the graphs of a function, what runs instead of them, and checkpoints in them."""

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
