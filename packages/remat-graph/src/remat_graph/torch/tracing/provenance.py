"""Which module and source line made each node of a joint graph.

While the forward is traced, each node is given a pair of words in torch's `meta["custom"]`, and
AOTAutograd copies it to the nodes of its backward. For a module these are read off the Python stack
at each function of torch; a graph that TorchDynamo made has them on its nodes (`note`), and is run
node by node.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node, traceback
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

from remat_graph.provenance import Provenance

__all__ = ["NotedInterpreter", "NotedModules", "note", "noted", "noted_now", "source_of"]

_KEY = "remat"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_CALL = torch.nn.Module._call_impl.__code__


def note(node: Node, provenance: Provenance) -> None:
    """Note on a node where it comes from; it is passed on to what is traced of it."""
    node.meta["custom"] = {
        **node.meta.get("custom", {}),
        _KEY: (provenance.module, provenance.source),
    }


def noted(node: Node) -> Provenance | None:
    """Read where a node comes from, if it is known."""
    words = node.meta.get("custom", {}).get(_KEY)
    return None if words is None else Provenance(*words)


def noted_now() -> tuple[str, str]:
    """Read module and source line of what is being run."""
    place: tuple[str, str] = traceback.current_meta.get("custom", {}).get(_KEY, ("", ""))
    return place


def source_of(frames: Iterable[tuple[str, int]]) -> str:
    """Give the first file and line that are not torch's own as `file:line`."""
    for file, line in frames:
        if not file.startswith(_TORCH):
            return f"{_as_imported(file)}:{line}"
    return ""


@functools.cache
def _as_imported(file: str) -> str:
    """Shorten a file's path to what is below the folder that it is imported from."""
    folders = [f"{folder.rstrip(os.sep)}{os.sep}" for folder in (*sys.path, str(Path.cwd()))]
    parents = [folder for folder in folders if file.startswith(folder) and folder != os.sep]
    if not parents:
        return Path(*Path(file).parts[-2:]).as_posix()
    return Path(file.removeprefix(max(parents, key=len))).as_posix()


def _noting(module: str, source: str) -> AbstractContextManager[None]:
    return annotate({_KEY: (module, source)})


class NotedInterpreter(Interpreter):
    """Runs a graph so that what is traced of a node comes from where the node does."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        provenance = noted(n)
        if provenance is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        with _noting(provenance.module, provenance.source):
            return getattr(self, n.op)(n.target, args, kwargs)


class NotedModules(TorchFunctionMode):
    """Notes at each function of torch which module called it, and at which of the user's lines.

    `outermost` is the code of the function that calls the module, at which the user's code begins.
    """

    def __init__(self, module: torch.nn.Module, outermost: CodeType) -> None:
        super().__init__()
        self._names = {id(part): name for name, part in module.named_modules()}
        self._outermost = outermost

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function."""
        with _noting(*self._place(sys._getframe(1))):
            return func(*args, **(kwargs or {}))

    def _place(self, frame: FrameType | None) -> tuple[str, str]:
        module, source = "", ""
        while frame is not None and frame.f_code is not self._outermost:
            code = frame.f_code
            if not source:
                source = source_of([(code.co_filename, frame.f_lineno)])
            if code is _CALL and not module:  # in no other frame: reading its locals keeps tensors
                module = self._names.get(id(frame.f_locals["self"]), "")
            if module and source:
                break
            frame = frame.f_back
        return module, source
