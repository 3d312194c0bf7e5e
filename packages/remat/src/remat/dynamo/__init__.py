"""TorchDynamo: the graphs of a function, what runs instead of them, and checkpoints in them."""

from remat.dynamo.call_watch import watch_calls
from remat.dynamo.frames import compile_frames
from remat.dynamo.graphs import (
    DynamoGraph,
    compiled_call,
    frame_of_call,
    graph_in_frame,
    is_last_compilation,
    let_through,
)
from remat.dynamo.nested_breaks import Across

__all__ = [
    "Across",
    "DynamoGraph",
    "compile_frames",
    "compiled_call",
    "frame_of_call",
    "graph_in_frame",
    "is_last_compilation",
    "let_through",
    "watch_calls",
]
