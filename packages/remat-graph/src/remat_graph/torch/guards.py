"""What a capture specialised on, and how to tell that a call differs from it.

A signature holds the shapes, strides, dtypes, devices and `requires_grad` of the input tensors, the
arguments that are no tensors, which tensors are the same object or share memory, and autocast. A
module's state holds its submodules, their hooks and plain attributes (`training` among them),
snapshots of their other attributes (a `config`, an activation), and the shape, stride, dtype,
device, `requires_grad` and sharing of parameters, buffers and tensor attributes; and, where given,
what the forward read outside of module and arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from remat_graph.torch.outside import Outside
from remat_graph.torch.snapshot import PLAIN, Snapshots, settings_of
from remat_graph.torch.structure import Structure

__all__ = ["ModuleState", "Signature", "TensorSignature", "shares_with_module"]

_IMMUTABLE = {*PLAIN, type, torch.dtype, torch.device}
_NO_TENSORS = {*PLAIN, tuple, list, dict, set, OrderedDict}  # isinstance takes longer
_SKIPPED = {"_is_full_backward_hook", "_non_persistent_buffers_set", "_is_replica"}


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
    storages: tuple[int, ...]
    structure: Structure
    autocast: tuple[tuple[str, torch.dtype], ...]
    default_dtype: torch.dtype
    shared: tuple[tuple[int, ...], ...] = ()

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
        number: dict[int, int] = {}
        storages = tuple(number.setdefault(_storage(t), len(number)) for t in tensors)
        return cls(described, slots, storages, structure, autocast, torch.get_default_dtype())

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
        if self.shared != other.shared:
            return "an argument shares memory with a parameter or buffer, or no longer does"
        if self.slots != other.slots:
            return "other arguments are the same tensor"
        if self.storages != other.storages:
            return "other tensor arguments share their memory"
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


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a captured graph assumes of one module, its submodules and settings aside."""

    keys: tuple[str, ...]
    plain: tuple[Any, ...]
    types: tuple[type, ...]
    tensor_keys: tuple[str, ...]
    tensors: list[Any]
    attributes: int
    hooks: int

    @classmethod
    def of(cls, owner: torch.nn.Module) -> _Facts:
        attributes = owner.__dict__
        # `training` is there twice so that an itemgetter of the keys gives a tuple
        keys = (
            "training",
            *(key for key, v in attributes.items() if isinstance(v, PLAIN) and key not in _SKIPPED),
        )
        plain = tuple(attributes[key] for key in keys)
        tensor_keys = tuple(k for k, v in attributes.items() if isinstance(v, torch.Tensor))
        return cls(
            keys,
            plain,
            tuple(map(type, plain)),
            tensor_keys,
            _tensors(owner, tensor_keys),
            len(attributes),
            len(_hooks(owner)),
        )


class ModuleState:
    """What a captured graph assumes of a module, by the names of its submodules.

    Reads nothing but attributes: checking a module of 200 submodules takes about a millisecond.
    """

    def __init__(self, module: torch.nn.Module, outside: Outside | None = None) -> None:
        self._outside = outside or Outside()
        take = Snapshots().take
        owners = dict(module.named_modules())
        self._facts = {name: _Facts.of(owner) for name, owner in owners.items()}
        self._settings = [
            (name, key, take(owner.__dict__[key]))
            for name, owner in owners.items()
            for key in settings_of(owner)
        ]
        self._sharing = _sharing(list(owners.values()))

    def bind(self, module: torch.nn.Module) -> Callable[[], str | None]:
        """Make a check of a module of the same tree: it returns what differs, or `None`."""
        named = dict(module.named_modules())
        for name in self._facts.keys() ^ named.keys():
            reason = f"the submodule {name or type(module).__name__} is new or gone"
            return lambda: reason
        modules = list(named.values())
        owners = [
            (name, owner, facts, itemgetter(*facts.keys), owner._modules.copy(), _hooks(owner))
            for name, owner in named.items()
            for facts in (self._facts[name],)
        ]
        take = Snapshots().take
        settings = [
            (name, attributes, key, taken, _fixed(value) if take(value) == taken else None)
            for name, key, taken in self._settings
            for attributes in (named[name].__dict__,)
            for value in (attributes.get(key),)
        ]
        everywhere = _global_hooks()

        def check() -> str | None:
            for name, owner, facts, read, children, hooks in owners:
                attributes = owner.__dict__
                if attributes["_modules"] != children:
                    return f"submodules of {name or 'the module'} were replaced"
                try:
                    plain = read(attributes)
                except KeyError:
                    return _difference(name, owner, facts)
                if (
                    tuple(map(type, plain)) != facts.types
                    or plain != facts.plain
                    or len(attributes) != facts.attributes
                    or _tensors(owner, facts.tensor_keys) != facts.tensors
                ):
                    return _difference(name, owner, facts)
                if _hooks(owner) != hooks or len(hooks) != facts.hooks:
                    return f"{name or type(owner).__name__} has other hooks"
            if _global_hooks() != everywhere:
                return "hooks of all modules were added or removed"
            take = Snapshots().take
            for name, attributes, key, taken, fixed in settings:
                value = attributes.get(key)
                if value is fixed and value is not None:  # snapshots take long
                    continue
                if take(value) != taken:
                    return f"{name}.{key} was changed".removeprefix(".")
            if _sharing(modules) != self._sharing:
                return "other parameters or buffers share their memory"
            return self._outside.difference()

        return check


def _fixed(value: Any) -> Any:
    """Return a value that cannot change unless another one takes its place; `None` for others."""
    parts = value if type(value) is tuple else (value,)
    return value if _IMMUTABLE.issuperset(map(type, parts)) else None


def shares_with_module(
    tensors: list[torch.Tensor], module: torch.nn.Module
) -> tuple[tuple[int, ...], ...]:
    """Find which inputs share memory with a module.

    For each input: the positions, among the parameters, buffers and tensor attributes of the
    module, of those that share its storage.
    """
    if not tensors:
        return ()
    own = [
        tensor
        for owner in module.modules()
        for tensor in (
            *owner._parameters.values(),
            *owner._buffers.values(),
            *[
                value
                for value in owner.__dict__.values()
                if type(value) not in _NO_TENSORS and isinstance(value, torch.Tensor)
            ],
        )
        if tensor is not None
    ]
    try:
        return _within(own, [_memory(tensor) for tensor in tensors])
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, fake, on meta, lazy
        pass
    wanted: dict[int, list[int]] = {_storage(tensor): [] for tensor in tensors}
    for position, tensor in enumerate(own):
        if (found := wanted.get(_storage(tensor))) is not None:
            found.append(position)
    return tuple(tuple(wanted[_storage(tensor)]) for tensor in tensors)


def _memory(tensor: torch.Tensor) -> range:
    """Find the addresses of a tensor's storage."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    if start == 0 and storage.nbytes():
        raise ValueError("a storage without memory")
    return range(start, start + storage.nbytes())


def _within(tensors: list[torch.Tensor], memory: list[range]) -> tuple[tuple[int, ...], ...]:
    """Find which tensors begin in each range; many times a step: asking for storages takes long."""
    lowest, highest = min(part.start for part in memory), max(part.stop for part in memory)
    there = [
        (position, address)
        for position, tensor in enumerate(tensors)
        if lowest <= (address := tensor.data_ptr()) < highest
    ]
    return tuple(
        tuple(position for position, address in there if address in part) for part in memory
    )


def _storage(tensor: torch.Tensor) -> int:
    """Identify the memory of a tensor; a tensor without a storage is its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, ValueError):  # sparse; a lazy parameter without its shape
        return -id(tensor)


def _hooks(owner: torch.nn.Module) -> list[int]:
    """List the ids of a module's hooks, which torch gives out once each."""
    return [
        *owner._forward_hooks,
        *owner._forward_pre_hooks,
        *owner._backward_hooks,
        *owner._backward_pre_hooks,
    ]


def _global_hooks() -> list[int]:
    """List the ids of the hooks that are registered for all modules."""
    return [
        *torch_module._global_forward_hooks,
        *torch_module._global_forward_pre_hooks,
        *torch_module._global_backward_hooks,
        *torch_module._global_backward_pre_hooks,
    ]


def _tensors(owner: torch.nn.Module, keys: tuple[str, ...]) -> list[Any]:
    """List the facts of parameters, buffers and the tensor attributes `keys`."""
    attributes = owner.__dict__
    found: list[Any] = [_tensor_facts(p) for p in attributes["_parameters"].values()]
    found.append("buffers")
    found += [_tensor_facts(b) for b in attributes["_buffers"].values()]
    found += [_tensor_facts(attributes.get(key)) for key in keys]
    return found


def _tensor_facts(tensor: Any) -> tuple[Any, ...] | None:
    if not isinstance(tensor, torch.Tensor):
        return None
    return (tensor.requires_grad, tensor.dtype, tensor.device, tensor.shape, tensor.stride())


def _difference(name: str, owner: torch.nn.Module, facts: _Facts) -> str:
    where = name or type(owner).__name__
    for key, value in zip(facts.keys, facts.plain, strict=True):
        now = owner.__dict__.get(key)
        if type(now) is not type(value) or now != value:
            return f"{where}.{key} was {value!r} and is {now!r}"
    if _tensors(owner, facts.tensor_keys) != facts.tensors:
        return f"a parameter, buffer or tensor of {where} has another shape, type or requires_grad"
    return f"{where} has other attributes"


def _sharing(modules: list[torch.nn.Module]) -> tuple[int, ...]:
    """Give parameters and buffers numbers that are equal for the same tensor."""
    number: dict[int, int] = {}
    return tuple(
        number.setdefault(id(tensor), len(number))
        for owner in modules
        for tensor in (*owner._parameters.values(), *owner._buffers.values())
    )
