"""What is said where torch fails on the user's code: the line, and what to write instead."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path

import torch
from torch.fx import Graph, Node

from remat_graph.torch.errors import CaptureError
from remat_graph.torch.tracing.provenance import NotedInterpreter, noted

__all__ = ["depends_on_data", "has_effects", "not_planned", "not_traced", "noted_line"]

_OWN_PACKAGES = ("torch", "remat_graph", "remat_exec", "remat")  # whose code is not the user's
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
_APART = (
    "in remat.rematerialize a function with @torch.compiler.disable around it runs as it is, "
    "between regions"
)


# Python's error where arguments do not fit.
_OF_CALL = re.compile(r"forward\(\) (missing|takes|got) ")

# What torch says of it: what it is, and what to write instead.
_KNOWN = {
    "convert all Tensors to FakeTensors": (
        "forward reads a tensor that is neither parameter, buffer, attribute nor input{line}",
        "register it (a list of parameters as nn.ParameterList, of modules as nn.ModuleList), or "
        "pass it in",
    ),
    "shape_env must not be None": (
        "forward has a nested tensor of torch.nested{line}, whose sizes are data",
        f"give it a padded one with a mask (to_padded_tensor); {_APART}, and all does with "
        "on_infeasible='plain'",
    ),
}


def depends_on_data(error: Exception) -> str:
    """Report that a graph would not be static; of a backward no line is known."""
    line = _user_line(error)
    if not line:
        return (
            f"in the backward of an operator a shape depends on the data of a tensor: {error}. One "
            f"static graph is captured here. That of an embedding with sparse=True and "
            f"padding_idx= is such a one: make it with sparse=False; or {_APART}"
        )
    return (
        f"control flow or a shape depends on the data of a tensor{line}: {error}. "
        f"One static graph is captured here: replace the branch by torch.where, or pass the number "
        f"as a Python argument. In remat.rematerialize, which runs the model, int(tensor) there "
        f"makes regions of what is before and after it"
    )


def not_traced(error: Exception) -> CaptureError:
    """Report that a forward raised an error, or that torch did while tracing it."""
    for words, (what, instead) in _KNOWN.items():
        if words in str(error):
            return CaptureError(f"{what.format(line=_user_line(error))}; {instead}")
    line = _user_line(error)
    if isinstance(error, TypeError) and not line and _OF_CALL.search(str(error)):
        return CaptureError(
            f"the example inputs do not fit the forward: {error}; give args and kwargs as in a "
            f"call of the model"
        )
    *_, innermost = traceback.extract_tb(error.__traceback__)
    advice = f"; {_APART}" if _is_of_torch_or_ours(innermost.filename) else ""
    return CaptureError(
        f"the forward pass cannot be traced{line}: {type(error).__name__}: {error}{advice}"
    )


def not_planned(node: Node, error: Exception) -> CaptureError:
    """Report that what was traced does not run on tensors without data."""
    return CaptureError(
        f"{node.target}{noted_line(node)} cannot be planned: {type(error).__name__}: {error}; "
        f"{_APART}"
    )


def has_effects(graph: Graph) -> CaptureError:
    """Report that an operator does something besides what it returns."""
    effect = next(
        node for node in graph.nodes if node.target is torch.ops.higher_order.with_effects
    )
    return CaptureError(
        f"{effect.args[1]}{noted_line(effect)} has an effect besides what it returns, and is in no "
        f"plan; {_APART}, and all does with on_infeasible='plain'"
    )


def noted_line(node: Node) -> str:
    """Give the user's line of a node, if it is known: ` at file:line`, or nothing."""
    provenance = noted(node)
    return f" at {provenance.source}" if provenance is not None and provenance.source else ""


def _user_line(error: BaseException) -> str:
    """Find the user's line that led to an error: ` at file:line`, or nothing."""
    for each, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(each.f_locals.get("self"), NotedInterpreter) and "n" in each.f_locals:
            provenance = noted(each.f_locals["n"])
            if provenance is not None and provenance.source:
                return f" at {provenance.source}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_of_torch_or_ours(frame.filename):
            return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""


def _is_of_torch_or_ours(file: str) -> bool:
    """Whether code is not the user's: Python's own, such as that of a cached property, neither."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _OWN_PACKAGES]
    folders = tuple(f"{Path(each).parent}{os.sep}" for each in files if each)
    return file.startswith(folders) or (
        file.startswith(_PYTHON) and "-packages" not in file.removeprefix(_PYTHON)
    )
