"""Python structures as a flat list of tensors and a description of the rest.

Tuples, lists, dicts, dataclasses, Hugging Face `ModelOutput`s and plain objects that hold tensors
(a key/value cache, say) are taken apart and put together again as the type they were. Nothing is
registered anywhere: the pytree registry of torch is process-wide, and not ours to change.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat_graph.torch.errors import CaptureError

__all__ = ["FlatCall", "Structure", "flatten", "read_call", "sharing", "tensors_of_call"]


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """How to put `leaves` tensors together again.

    A leaf is a tensor; `constant` is what is neither a tensor nor holds one. `template` is the
    object that was taken apart, where another is made as a copy of it.
    """

    kind: str
    type: type
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    constant: Any = None
    template: Any = None

    @property
    def leaves(self) -> int:
        """Number of tensors."""
        return 1 if self.kind == "tensor" else sum(child.leaves for child in self.children)

    def paths(self, prefix: str = "") -> Iterator[str]:
        """Yield a readable name for each tensor, such as `[0].loss`."""
        if self.kind == "tensor":
            yield prefix
        for key, child in zip(self.keys, self.children, strict=True):
            dotted = self.kind in ("dataclass", "object") or (
                self.kind == "dict" and self.type is not dict and isinstance(key, str)
            )
            yield from child.paths(prefix + (f".{key}" if dotted else f"[{key!r}]"))

    def rebuild(self, tensors: Iterator[torch.Tensor]) -> Any:
        """Put the structure together from its tensors, in the order of `flatten`."""
        if self.kind == "tensor":
            return next(tensors)
        if self.kind == "constant":
            return self.constant
        parts = [child.rebuild(tensors) for child in self.children]
        return _BUILDERS[self.kind](self, parts)


def flatten(item: Any) -> tuple[list[torch.Tensor], Structure]:
    """Take a structure apart.

    Raises:
        CaptureError: if an object with tensors refers to itself.
    """
    tensors: list[torch.Tensor] = []
    return tensors, _flatten(item, tensors, ())


@dataclass(frozen=True, slots=True)
class FlatCall:
    """The arguments of one call, taken apart: `structure` takes its leaves from `tensors[slot]`."""

    tensors: list[torch.Tensor]
    slots: tuple[int, ...]
    structure: Structure

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the arguments of a call with other tensors."""
        args, kwargs = self.structure.rebuild(iter([tensors[slot] for slot in self.slots]))
        return args, kwargs


def read_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatCall:
    """Take the arguments of a call apart; a tensor given twice is there once."""
    leaves, structure = flatten((args, dict(kwargs)))
    tensors, slots = tensors_of_call(leaves)
    return FlatCall(tensors, slots, structure)


def tensors_of_call(inputs: Sequence[Any]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """List the tensors among the inputs of a call, each once, and where in that list each one is.

    Programs are of that list: a call in which others are the same is traced apart (`sharing`).
    """
    given = [item for item in inputs if isinstance(item, torch.Tensor)]
    if len({*map(id, given)}) == len(given):  # as nearly always, and each call waits for this
        return given, tuple(range(len(given)))
    position: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    slots = []
    for tensor in given:
        if id(tensor) not in position:
            position[id(tensor)] = len(tensors)
            tensors.append(tensor)
        slots.append(position[id(tensor)])
    return tensors, tuple(slots)


def sharing(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Say which tensors among the inputs of a call are the same; nothing if all are others."""
    tensors, slots = tensors_of_call(inputs)
    return slots if len(tensors) < len(slots) else ()


def _flatten(item: Any, tensors: list[torch.Tensor], above: tuple[int, ...]) -> Structure:
    if isinstance(item, torch.Tensor):
        tensors.append(item)
        return Structure("tensor", type(item))
    if item is None or isinstance(item, (bool, int, float, complex, str, bytes)):
        return _constant(item)
    if id(item) in above:
        raise CaptureError(
            f"a {type(item).__name__} in the inputs or outputs contains itself; "
            f"pass or return its tensors without the cycle"
        )
    above = (*above, id(item))
    kind, keys, parts = _take_apart(item)
    if kind == "constant":
        return _constant(item)
    children = tuple(_flatten(part, tensors, above) for part in parts)
    if kind == "object" and not any(child.leaves for child in children):
        return _constant(item)
    template = item if kind in ("object", "dataclass", "dict") else None
    return Structure(kind, type(item), keys, children, template=template)


def _constant(item: Any) -> Structure:
    return Structure("constant", type(item), constant=item)


def _take_apart(item: Any) -> tuple[str, tuple[Any, ...], list[Any]]:
    if isinstance(item, (tuple, list)):
        return "sequence", tuple(range(len(item))), list(item)
    if isinstance(item, dict):
        return "dict", tuple(item), list(item.values())
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        names = tuple(f.name for f in dataclasses.fields(item))
        return "dataclass", names, [getattr(item, name) for name in names]
    state = getattr(item, "__dict__", None)
    if state is None or isinstance(item, (type, torch.nn.Module)) or callable(item):
        return "constant", (), []
    return "object", tuple(state), list(state.values())


def _build_sequence(structure: Structure, parts: list[Any]) -> Any:
    if structure.type in (tuple, list):
        return structure.type(parts)
    if hasattr(structure.type, "_fields"):
        return structure.type(*parts)
    return structure.type(parts)  # subclasses of list, and torch.return_types


def _build_dict(structure: Structure, parts: list[Any]) -> Any:
    items = zip(structure.keys, parts, strict=True)
    if structure.type in (dict, OrderedDict):
        return structure.type(items)
    if dataclasses.is_dataclass(structure.type):  # ModelOutput: a dict and a dataclass at once
        return structure.type(**dict(items))
    built = copy.copy(structure.template)
    built.update(items)
    return built


def _build_object(structure: Structure, parts: list[Any]) -> Any:
    built = copy.copy(structure.template)
    for key, part in zip(structure.keys, parts, strict=True):
        object.__setattr__(built, key, part)
    return built


_BUILDERS: dict[str, Callable[[Structure, list[Any]], Any]] = {
    "sequence": _build_sequence,
    "dict": _build_dict,
    "dataclass": _build_object,
    "object": _build_object,
}
