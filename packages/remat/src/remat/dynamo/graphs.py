"""A graph that Dynamo found: its function, why it ends, and where its operations are from.

Also what a back end may ask and set while Dynamo compiles for someone else.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch._dynamo import config, eval_frame
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.external_utils import wrap_inline
from torch._guards import CompileContext

from remat.dynamo.inner_gradients import let_differentiate_again
from remat_graph import Provenance
from remat_graph.torch import note, source_of

__all__ = [
    "APART",
    "EACH_TENSOR",
    "WITHIN",
    "DynamoGraph",
    "compiled_call",
    "frame_of_call",
    "graph_in_frame",
    "is_last_compilation",
    "let_through",
    "name_of_frame",
    "note_provenance",
    "read_graph",
]

# Guards pass by what an unchanged dictionary holds: torch 2.11 so misses a parameter thawed.
EACH_TENSOR = {
    "skip_tensor_guards_with_matching_dict_tags": False,
    "use_recursive_dict_tags_for_guards": False,
}
# Before torch 2.13 all that is compiled of some code is in one list, told apart by its back end.
_OPTIONS = inspect.signature(eval_frame._optimize).parameters
APART: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in _OPTIONS else {}
_FRAME = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)
WITHIN = wrap_inline(print).__code__  # in which Dynamo runs what it would pass by
_FRAME_LOCAL = re.compile(r"^[LG]\['[^']*'\]\.?")  # as Dynamo writes `self`


@dataclass(frozen=True, slots=True)
class DynamoGraph:
    """A graph that Dynamo found: all of a frame, or the part before a break.

    `name` is that of the frame's function. `break_reason` says why the graph ends before the frame
    does, with the user's line; `None` if it does not. `whole` says that it is all of the function.
    `caller` is the line of a function that Dynamo made no graph of, if that is what leads to the
    first graph.
    """

    graph: torch.fx.GraphModule
    name: str
    break_reason: str | None
    whole: bool
    caller: str | None = None


def graph_in_frame(graph: torch.fx.GraphModule, frames: set[int]) -> DynamoGraph:
    """Describe a graph within a frame that Dynamo is compiling, for whoever asked it to.

    `frames` are those of the same function that were met before, to which this one is added. Before
    torch 2.13 guards, which are made after this, look at each tensor from now on, whoever compiles.
    """
    if not APART:
        config.load_config(EACH_TENSOR)
    current = CompileContext.current_compile_id()
    frames.add(-1 if current is None or current.frame_id is None else current.frame_id)
    note_provenance(graph, None)
    compiling = _compiling()
    caller = _caller(compiling) if len(frames) == 1 else None
    name = "a frame" if compiling is None else name_of_frame(compiling.f_locals["frame"])
    described = read_graph(graph, name, len(frames) == 1 and caller is None)
    return dataclasses.replace(described, caller=caller)


def name_of_frame(frame: Any) -> str:
    """Name a function; a method of a module by its class, which may not be the one it is of.

    So is what wraps a method and is handed its arguments, or holds it as `wrap_inline` does.
    """
    held = frame.f_locals
    called = "forward" if frame.f_code is WITHIN else frame.f_code.co_name
    args = held.get("args")
    first = args[:1] if isinstance(args, tuple) else ()
    for owner in (held.get("self"), getattr(held.get("fn"), "__self__", held.get("fn")), *first):
        if isinstance(owner, torch.nn.Module):
            return f"{type(owner).__name__}.{called}"
    name: str = frame.f_code.co_qualname
    return name


def compiled_call() -> object:
    """Find what stands for the `torch.compile` whose code is at work: one object for each.

    What two of them compiled with equal options of the same code, they share.
    """
    frame = frame_of_call()
    return None if frame is None else frame.f_locals["callback"]


def frame_of_call() -> FrameType | None:
    """Find the frame in which what a `torch.compile` made is called."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename == eval_frame.__file__:
            return frame
        frame = frame.f_back
    return None


def _compiling() -> FrameType | None:
    """Find the frame of Dynamo's in which it compiles another, its local `frame`."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code is not CatchErrorsWrapper.__call__.__code__:
        frame = frame.f_back
    return frame


def _caller(compiling: FrameType | None) -> str | None:
    """Find who calls the frame that Dynamo is compiling, unless it is `torch.compile` itself."""
    frame = compiling and compiling.f_back
    while frame is not None and frame.f_code.co_filename == torch.nn.modules.module.__file__:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename == eval_frame.__file__:
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_last_compilation() -> bool:
    """Whether Dynamo will compile the frame at work no more, whatever it is called with."""
    current = CompileContext.current_compile_id()
    if current is None or current.frame_compile_id is None:
        return False
    limit = min(config.recompile_limit, config.accumulated_recompile_limit)
    return current.frame_compile_id + 1 >= limit > 1


def let_through(error: Exception) -> Exception:
    """Make an error of a back end one of the same type that Dynamo raises as it is."""
    kind = type(error)
    error_type: Any = type(kind.__name__, (kind, ShortenTraceback), {"__module__": kind.__module__})
    raised: Exception = error_type.__new__(error_type, *error.args)
    raised.__dict__.update(vars(error), first_useful_frame=None)
    return raised.with_traceback(error.__traceback__)


def read_graph(graph: torch.fx.GraphModule, name: str, first: bool) -> DynamoGraph:
    """Describe a graph; `first` says that the frame is that of the function itself."""
    let_differentiate_again(graph)
    reason: Any = graph.compile_subgraph_reason
    broken = _describe(reason) if reason.graph_break else None
    return DynamoGraph(graph, name, broken, first and broken is None)


def note_provenance(graph: torch.fx.GraphModule, model: torch.nn.Module | None) -> None:
    """Note on the nodes of a graph which module and source line they come from.

    A module that is no part of `model` is named from what the frame's function reads.
    """
    paths = {} if model is None else {str(id(part)): name for name, part in model.named_modules()}
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    for node in (node for part in parts for node in part.graph.nodes):
        modules = [
            paths.get(key.partition("@")[0], _FRAME_LOCAL.sub("", name))
            for key, (name, _) in node.meta.get("nn_module_stack", {}).items()
        ]
        frames = _FRAME.findall(node.stack_trace or "")
        source = source_of((file, int(line)) for file, line in reversed(frames))
        if modules or source:
            note(node, Provenance(modules[-1] if modules else "", source))


def _describe(reason: Any) -> str:
    lines = reason.user_stack
    where = f" at {lines[-1].filename}:{lines[-1].lineno} ({lines[-1].line})" if lines else ""
    return f"{reason.reason.splitlines()[0]}{where}"
