"""Submodules of a rematerialized model: those that are regions of their own, and copies of them.

The original model keeps its submodules as they are. What has another forward in the copy is copied,
and so is what contains it; parameters, buffers and all other submodules are shared.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from remat.errors import RematError
from remat.front.dispatch_modes import is_beneath_a_mode
from remat.refusals import refuse_checkpointed, refuse_transforms

__all__ = [
    "RegionForward",
    "Regions",
    "choose_regions",
    "copy_within",
    "end_copying",
    "shallow_copy",
    "tensors_of",
    "unwrap_units",
]

Module = TypeVar("Module", bound=torch.nn.Module)
Regions = str | type[torch.nn.Module] | Sequence[str | type[torch.nn.Module]]


def choose_regions(model: torch.nn.Module, regions: Regions | None) -> list[str]:
    """Name the submodules that are to be regions; of one within another, only the outer.

    Raises:
        RematError: if an entry matches no submodule, or is neither a name nor a class.
    """
    if regions is None:
        return []
    several = list(regions) if isinstance(regions, Iterable) else [None]
    entries = [regions] if isinstance(regions, (str, type)) else several
    names = {name: part for name, part in model.named_modules() if name}
    selected: set[str] = set()
    for entry in entries:
        if isinstance(entry, str):
            matched = fnmatch.filter(names, entry)
        elif isinstance(entry, type):
            matched = [name for name, part in names.items() if isinstance(part, entry)]
        else:
            raise RematError(f"regions={regions!r}; give names, patterns or classes of submodules")
        if not matched:
            shown = ", ".join(list(names)[:5])
            raise RematError(
                f"regions: {entry!r} matches no submodule; there are {shown}"
                f"{', ...' if len(names) > 5 else ''}"
            )
        selected.update(matched)
    return [name for name in names if name in selected and not _within(name, selected)]


def _within(name: str, others: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in others for end in range(1, len(parts)))


def shallow_copy(model: Module) -> Module:
    """Copy a module that shares its parameters, buffers and submodules with the copy."""
    twin = copy.copy(model)
    for name, item in model.__dict__.items():
        if isinstance(item, dict):  # parameters, buffers, submodules, hooks: own dict, same entries
            twin.__dict__[name] = copy.copy(item)
    return twin


def copy_within(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Put a shallow copy of a submodule in its place, wherever in the model it stands.

    What it stands in is copied as well, for it is shared with the original.
    """
    *path, last = name.split(".")
    owner = model
    for part in path:
        inner = owner._modules[part]
        if inner is None:
            raise RematError(f"there is no submodule {name!r}")
        if _COPIED not in inner.__dict__:
            inner = _replace(model, inner)
        owner = inner
    module = owner._modules[last]
    if module is None:
        raise RematError(f"there is no submodule {name!r}")
    return module if _COPIED in module.__dict__ else _replace(model, module)


_COPIED = "_remat_copied"


def end_copying(model: torch.nn.Module) -> None:
    """Take what was copied for the model's own from now on: a copy of it copies it again."""
    for part in model.modules():
        part.__dict__.pop(_COPIED, None)


def _replace(model: torch.nn.Module, old: Module) -> Module:
    twin = shallow_copy(old)
    twin.__dict__[_COPIED] = True
    for part in model.modules():
        if part is model or _COPIED in part.__dict__:
            for name, item in part._modules.items():
                if item is old:
                    part._modules[name] = twin
    return twin


def unwrap_units(model: torch.nn.Module) -> None:
    """Let submodules that are rematerialized run as they were: one plan holds for all of it."""
    for name, part in list(model.named_modules()):
        forward = part.__dict__.get("forward")
        if name and hasattr(forward, "original_forward"):
            unit = copy_within(model, name)
            original = forward.instance_forward
            unit.__dict__.pop("forward")
            unit.__dict__.pop("_compiled_call_impl", None)
            if original is not None:
                unit.__dict__["forward"] = original
            for key, hook in list(unit._forward_pre_hooks.items()):
                if getattr(hook, "__self__", None) is forward:
                    del unit._forward_pre_hooks[key]


class Owner(Protocol):
    """The forward of the model that submodules are regions of."""

    def run_region(self, block: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the forward of a submodule as a region."""
        ...


class RegionForward:
    """Stands in for `forward` on a submodule that is a region of a rematerialized model."""

    def __init__(self, module: torch.nn.Module, owner: Owner) -> None:
        self._module = module
        self._owner = owner
        self._dress()

    def _dress(self) -> None:
        function: Callable[..., Any] = type(self._module).forward
        functools.update_wrapper(self, function, updated=())
        self.__dict__.pop("__wrapped__")
        signature = inspect.signature(function)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the submodule, by a plan if gradients are on.

        Raises:
            RematError: if it is called within a transform of `torch.func` or a checkpoint.
        """
        refuse_checkpointed(type(self._module).__name__)
        if torch.is_grad_enabled():
            refuse_transforms()
        if not torch.is_grad_enabled() or is_beneath_a_mode():
            return type(self._module).forward(self._module, *args, **kwargs)
        return self._owner.run_region(self._module, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionForward:
        module = memo.get(id(self._module)) or copy.deepcopy(self._module, memo)
        forward = RegionForward(module, copy.deepcopy(self._owner, memo))
        memo[id(self)] = forward
        return forward

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self._module, "owner": self._owner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._module, self._owner = state["module"], state["owner"]
        self._dress()


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """List the parameters, and the tensors that are plain attributes."""
    attributes = (item for part in module.modules() for item in vars(part).values())
    return [*module.parameters(), *(item for item in attributes if isinstance(item, torch.Tensor))]
