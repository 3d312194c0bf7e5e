"""Stands in for torchvision and torchaudio, of which models that import them may need nothing.

Their builds for CUDA do not load beside torch for the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from torch import nn

__all__ = ["stood_in"]

STOOD_IN = ("torchvision", "torchaudio")


class _Anything(types.ModuleType):
    """A module that has every class, and every module in lower case."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        return type(name, (nn.Module,), {"BILINEAR": 2, "BICUBIC": 3, "NEAREST": 0,
                                         "LANCZOS": 1, "HAMMING": 5, "BOX": 4})  # fmt: skip


class _Finder(MetaPathFinder, Loader):
    """Finds a module of any name in the packages that cannot be imported."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def stood_in() -> Iterator[None]:
    """Let what is imported meanwhile find each of the packages that cannot be imported."""
    finder = _Finder([name for name in STOOD_IN if not _importable(name)])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] in finder.packages]:
            del sys.modules[name]


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return False
    return True
