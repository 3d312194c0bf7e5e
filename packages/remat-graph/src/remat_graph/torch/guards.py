"""What a capture specialised on, and how to tell that a call differs from it.

A signature holds the shapes, strides, dtypes, devices and `requires_grad` of the input tensors, the
arguments that are no tensors, which tensors are the same object, and autocast. A module's state
holds its submodules, their plain attributes (`training` among them) and settings (a `config`), and
the shape, stride, dtype, device, `requires_grad` and sharing of parameters, buffers and tensor
attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from remat_graph.torch.structure import Structure

__all__ = ["ModuleState", "Signature", "TensorSignature"]

_PLAIN = (bool, int, float, complex, str, type(None))
_SKIPPED = {"_is_full_backward_hook", "_non_persistent_buffers_set", "_is_replica"}
_OWN_ATTRIBUTES = frozenset(torch.nn.Module().__dict__)


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """What a captured graph assumes of one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSignature:
        """Read it off a tensor."""
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )


@dataclass(frozen=True, slots=True)
class Signature:
    """What a captured graph assumes of a call."""

    tensors: tuple[TensorSignature, ...]
    slots: tuple[int, ...]
    structure: Structure
    autocast: tuple[tuple[str, torch.dtype], ...]
    default_dtype: torch.dtype

    @classmethod
    def of(
        cls, tensors: list[torch.Tensor], slots: tuple[int, ...], structure: Structure
    ) -> Signature:
        """Read it off the distinct tensors of a call, and the mode that torch is in."""
        devices = {"cpu", *(tensor.device.type for tensor in tensors)}
        autocast = tuple(
            (device, torch.get_autocast_dtype(device))
            for device in sorted(devices)
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        )
        described = tuple(TensorSignature.of(t) for t in tensors)
        return cls(described, slots, structure, autocast, torch.get_default_dtype())

    def difference(self, other: Signature) -> str | None:
        """Say in which way another call differs from this one; `None` if it does not."""
        if self.autocast != other.autocast:
            return f"autocast was {self.autocast or 'off'} and is {other.autocast or 'off'}"
        if self.default_dtype != other.default_dtype:
            return f"the default dtype was {self.default_dtype} and is {other.default_dtype}"
        try:
            same = self.structure == other.structure
        except Exception:  # an argument whose == does not give a truth value
            same = False
        if not same:
            return "its arguments other than tensors, or their structure, differ"
        if self.slots != other.slots:
            return "other arguments are the same tensor"
        names = [name or "input" for name in self.structure.paths()]
        for position, slot in enumerate(self.slots):
            if self.tensors[slot] != other.tensors[slot]:
                return (
                    f"tensor argument {names[position]} was {_describe(self.tensors[slot])} "
                    f"and is {_describe(other.tensors[slot])}"
                )
        return None


def _describe(tensor: TensorSignature) -> str:
    grad = ", requires_grad" if tensor.requires_grad else ""
    return (
        f"{list(tensor.shape)} strides {list(tensor.stride)} {tensor.dtype} {tensor.device}{grad}"
    )


class ModuleState:
    """What a captured graph assumes of a module, by the names of its submodules.

    Reads nothing but attributes: checking a module of 200 submodules takes a fraction of a
    millisecond.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._facts: dict[str, tuple[Any, ...]] = {
            name: _module_facts(owner) for name, owner in module.named_modules()
        }
        self._settings = {
            name: _setting_facts(owner.__dict__.get(key))
            for name, owner, key in _settings_of(module)
        }
        self._sharing = _sharing(list(module.modules()))

    def bind(self, module: torch.nn.Module) -> Callable[[], str | None]:
        """Make a check of a module of the same tree: it returns what differs, or `None`."""
        owners = [
            (
                name,
                owner,
                self._facts.get(name),
                _plain_getter(owner),
                tuple(owner._modules.values()),
                _hooks(owner),
            )
            for name, owner in module.named_modules()
        ]
        settings = _settings_of(module)
        modules = [owner for _, owner, *_ in owners]

        def check() -> str | None:
            for name, owner, facts, plain, children, hooks in owners:
                if tuple(owner._modules.values()) != children:
                    return f"submodules of {name or 'the module'} were replaced"
                if facts is None or plain(owner.__dict__) != facts[0] or _rest(owner) != facts[1]:
                    return _fact_difference(name, owner, facts)
                if _hooks(owner) != hooks:
                    return f"{name or type(owner).__name__} has other hooks"
            for name, owner, key in settings:
                if _setting_facts(owner.__dict__.get(key)) != self._settings.get(name):
                    return f"{name} was changed"
            if _sharing(modules) != self._sharing:
                return "other parameters or buffers share their memory"
            return None

        return check


def _settings_of(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str]]:
    """Find the attributes that hold settings, such as a `config` or a list, once each."""
    found = []
    seen: set[int] = set()
    for name, owner in module.named_modules():
        for key, value in owner.__dict__.items():
            if key in _OWN_ATTRIBUTES or id(value) in seen or _setting_facts(value) is None:
                continue
            seen.add(id(value))
            found.append((f"{name}.{key}".removeprefix("."), owner, key))
    return found


def _setting_facts(value: object) -> list[tuple[Any, Any]] | None:
    """List the plain entries of a container or an object; `None` for anything else."""
    if isinstance(value, (list, tuple)):
        entries: Any = enumerate(value)
    elif isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, (torch.nn.Module, torch.Tensor, type)) or callable(value):
        return None
    else:
        entries = getattr(value, "__dict__", {}).items()
    facts = [(key, item) for key, item in entries if isinstance(item, _PLAIN)]
    return facts or None


def _module_facts(owner: torch.nn.Module) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return _plain_getter(owner)(owner.__dict__), _rest(owner)


def _plain_getter(owner: torch.nn.Module) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Make a function that reads the plain attributes, and how many attributes there are."""
    keys = [
        key
        for key, value in owner.__dict__.items()
        if isinstance(value, _PLAIN) and key not in _SKIPPED
    ]

    def read(attributes: dict[str, Any]) -> tuple[Any, ...]:
        return (keys, [attributes.get(key) for key in keys], len(attributes))

    return read


def _rest(owner: torch.nn.Module) -> tuple[Any, ...]:
    attributes = owner.__dict__
    return (
        [_tensor_facts(p) for p in owner._parameters.values()],
        [_tensor_facts(b) for b in owner._buffers.values()],
        [_tensor_facts(t) for t in attributes.values() if isinstance(t, torch.Tensor)],
        len(_hooks(owner)),
    )


def _hooks(owner: torch.nn.Module) -> list[int]:
    """List the ids of a module's hooks, which torch gives out once each."""
    return [
        *owner._forward_hooks,
        *owner._forward_pre_hooks,
        *owner._backward_hooks,
        *owner._backward_pre_hooks,
    ]


def _tensor_facts(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    return (tensor.requires_grad, tensor.dtype, tensor.device, tensor.shape, tensor.stride())


def _fact_difference(
    name: str, owner: torch.nn.Module, facts: tuple[tuple[Any, ...], tuple[Any, ...]] | None
) -> str:
    where = name or type(owner).__name__
    if facts is None:
        return f"the submodule {where} is new"
    (keys, values, _), rest = facts
    for key, value in zip(keys, values, strict=True):
        if (now := owner.__dict__.get(key)) != value:
            return f"{where}.{key} was {value!r} and is {now!r}"
    if rest[3] != _rest(owner)[3]:
        return f"{where} has other hooks"
    if rest != _rest(owner):
        return f"a parameter, buffer or tensor of {where} has another shape, type or requires_grad"
    return f"{where} has other plain attributes"


def _sharing(modules: list[torch.nn.Module]) -> tuple[int, ...]:
    """Give parameters and buffers numbers that are equal for the same tensor."""
    number: dict[int, int] = {}
    return tuple(
        number.setdefault(id(tensor), len(number))
        for owner in modules
        for tensor in (*owner._parameters.values(), *owner._buffers.values())
    )
