"""From a module and its example call to a joint graph: flat tensors in, flat tensors out.

The module's own `forward` runs once under tracing. What it does besides computing is caught here: a
buffer that is replaced becomes an update in place; any other tensor or number that it stores on a
module, or a draw from Python's own random numbers, would be frozen into the graph, and is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from remat_graph.torch._aot import Joint, is_traced_tensor, trace_joint
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.outside import Outside, Reads
from remat_graph.torch.snapshot import Snapshots, settings_of
from remat_graph.torch.structure import Structure, flatten

__all__ = ["FlatRegion", "Traced", "trace", "trace_region"]

_SCALARS = (bool, int, float, complex, str, bytes)
_TRACING_SEED = 0x5EED_0F_72ACE  # one that no forward sets


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A joint graph, the distinct input tensors, and what else the forward read."""

    joint: Joint
    tensors: list[torch.Tensor]
    output_structure: Structure
    outside: Outside


def trace(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Trace `module.forward(*args, **kwargs)` and its backward pass.

    Raises:
        CaptureError: if the forward cannot be one static graph, or stores something on the module.
    """
    _refuse_lost_dropout(module)
    _refuse_old_norms(module)
    leaves, structure = flatten((args, kwargs))
    tensors, slots = distinct(leaves)
    flat = _FlatModule(module, structure, slots)
    with (
        _no_hidden_draws(),
        original_forwards(module),
        _attributes_restored(module),
        _rnn_in_steps(),
    ):
        joint = flat.name_inputs(trace_joint(flat, [_as_leaf(tensor) for tensor in tensors]))
    if flat.output_structure is None:
        raise CaptureError("the forward pass was not run")
    return Traced(joint, tensors, flat.output_structure, flat.reads.settle())


class FlatRegion(torch.nn.Module):
    """A function of a flat list of inputs, as a module whose inputs are distinct tensors alone."""

    def __init__(
        self, region: Callable[..., Any], inputs: Sequence[Any], tensors: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._region = region
        position = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._inputs = [position.get(id(item), item) for item in inputs]
        self._is_tensor = [isinstance(item, torch.Tensor) for item in inputs]
        _, self.output_structure = flatten(())

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Give the tensors that the function returns."""
        given = zip(self._inputs, self._is_tensor, strict=True)
        result = self._region(*(tensors[item] if known else item for item, known in given))
        leaves, self.output_structure = flatten(result)
        return leaves


def trace_region(region: FlatRegion, tensors: list[torch.Tensor]) -> Joint:
    """Trace a region and its backward pass.

    Raises:
        CaptureError: if it cannot be one static graph.
    """
    with _rnn_in_steps():
        return trace_joint(region, [_as_leaf(tensor) for tensor in tensors])


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Cut a tensor off from what made it: torch warns where it reads `.grad` of one that is not."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


def distinct(leaves: list[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Drop repeated tensors; the second result gives each leaf's position in the first."""
    position: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    slots = []
    for leaf in leaves:
        if id(leaf) not in position:
            position[id(leaf)] = len(tensors)
            tensors.append(leaf)
        slots.append(position[id(leaf)])
    return tensors, tuple(slots)


class _FlatModule(torch.nn.Module):
    """`module` as a function from a flat list of tensors to a flat list of tensors.

    Tensors that are plain attributes of a module are lifted to inputs of the graph, as buffers are.
    """

    def __init__(
        self, module: torch.nn.Module, structure: Structure, slots: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._structure = structure
        self._slots = slots
        self._lifted = [
            (f"{name}.{key}".removeprefix("."), owner, key)
            for name, owner in module.named_modules()
            for key, value in owner.__dict__.items()
            if isinstance(value, torch.Tensor)
        ]
        for index, (_, owner, key) in enumerate(self._lifted):
            self.register_buffer(f"lifted_{index}", owner.__dict__[key])
        self.output_structure: Structure | None = None
        self.reads = Reads(module)

    def name_inputs(self, joint: Joint) -> Joint:
        """Name parameters, buffers and attributes as `module` does."""
        names = {f"lifted_{index}": name for index, (name, *_) in enumerate(self._lifted)}

        def named(kind: str, key: str | int) -> tuple[str, str | int]:
            if isinstance(key, str) and key in names:
                return "attribute", names[key]
            return kind, key.removeprefix("module.") if isinstance(key, str) else key

        inputs = {node: named(*role) for node, role in joint.inputs.items()}
        return dataclasses.replace(joint, inputs=inputs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Name each parameter once for each module that has it.

        A module that stands at two places is one module: swapping its parameters once for each
        place, as `remove_duplicate=False` has it, would leave the first swap in the user's model.
        """
        for name, owner in self.module.named_modules(prefix=f"{prefix}.module".lstrip(".")):
            yield from owner.named_parameters(name, recurse=False, remove_duplicate=False)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Name each buffer once for each module that has it."""
        yield from super().named_buffers(prefix, recurse=False, remove_duplicate=False)
        for name, owner in self.module.named_modules(prefix=f"{prefix}.module".lstrip(".")):
            yield from owner.named_buffers(name, recurse=False, remove_duplicate=False)

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = self._structure.rebuild(iter([tensors[slot] for slot in self._slots]))
        for index, (_, owner, key) in enumerate(self._lifted):
            owner.__dict__[key] = getattr(self, f"lifted_{index}")
        in_place = _replaced_buffers_written_in_place(self.module)
        with in_place, _not_seeded(), self.reads.noted():
            result = original_forward(self.module)(*args, **kwargs)
        for index, (_, owner, key) in enumerate(self._lifted):
            if owner.__dict__.get(key) is not getattr(self, f"lifted_{index}"):
                raise CaptureError(
                    f"forward replaces the tensor {key!r} of a {type(owner).__name__}; "
                    f"update it in place, or keep it in a registered buffer"
                )
        leaves, self.output_structure = flatten(result)
        return leaves


def original_forward(module: torch.nn.Module) -> Any:
    """Find the forward that a module had before it was rematerialized."""
    forward = module.forward
    return getattr(forward, "original_forward", forward)


@contextmanager
def original_forwards(module: torch.nn.Module) -> Iterator[None]:
    """Let submodules that are rematerialized run as they were: one plan holds for all of it."""
    planned = [
        (part, part.__dict__["forward"])
        for part in module.modules()
        if hasattr(part.__dict__.get("forward"), "original_forward")
    ]
    for part, forward in planned:
        part.__dict__["forward"] = forward.original_forward
    try:
        yield
    finally:
        for part, forward in planned:
            part.__dict__["forward"] = forward


@contextmanager
def _replaced_buffers_written_in_place(module: torch.nn.Module) -> Iterator[None]:
    before = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    yield
    for owner, name, buffer in before:
        new = owner._buffers.get(name)
        if new is buffer:
            continue
        if not isinstance(new, torch.Tensor) or (new.shape, new.dtype) != (
            buffer.shape,
            buffer.dtype,
        ):
            raise CaptureError(
                f"forward replaces the buffer {name!r} of a {type(owner).__name__} by something "
                f"of another shape or type; keep its shape, and update it in place"
            )
        with torch.no_grad():
            buffer.copy_(new)
        owner._buffers[name] = buffer


@contextmanager
def _attributes_restored(module: torch.nn.Module) -> Iterator[None]:
    before = [(name, owner, dict(owner.__dict__)) for name, owner in module.named_modules()]
    then = Snapshots()
    settings = {owner: _settings(owner, then) for _, owner, _ in before}
    try:
        yield
        now = Snapshots()
        for name, owner, attributes in before:
            where = name or type(module).__name__
            _refuse_stored(where, attributes, owner.__dict__)
            _refuse_changed(where, attributes, settings[owner], _settings(owner, now))
            _refuse_leaked(where, owner)
    finally:
        for _, owner, attributes in before:
            for key in owner.__dict__.keys() - attributes.keys():
                del owner.__dict__[key]
            owner.__dict__.update(attributes)


def _refuse_stored(name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    parameters = [p for p in before["_parameters"].values() if p is not None]
    for key, value in after.items():
        if key.startswith("_") and key in torch.nn.Module().__dict__:
            continue
        if isinstance(before.get(key), torch.Tensor):  # lifted, and checked where it was
            continue
        parts = _parts(value)
        if _all_in(_parts(before.get(key)), parameters):  # other names for them, as nn.LSTM has
            continue
        if any(is_traced_tensor(part) for part in parts):
            raise CaptureError(
                f"forward stores a tensor in {name}.{key}, where a replay would leave it stale; "
                f"return it instead, or keep it in a registered buffer"
            )
        old = before.get(key)
        if isinstance(value, _SCALARS) and (type(old) is not type(value) or old != value):
            raise CaptureError(
                f"forward changes {name}.{key} from {old!r} to {value!r}, which a captured graph "
                f"cannot repeat; keep it in a registered buffer, or change it outside forward"
            )


def _settings(owner: torch.nn.Module, snapshots: Snapshots) -> dict[str, Hashable]:
    return {key: snapshots.take(owner.__dict__[key]) for key in settings_of(owner)}


def _refuse_changed(
    name: str, attributes: dict[str, Any], before: dict[str, Hashable], after: dict[str, Hashable]
) -> None:
    parameters = [p for p in attributes["_parameters"].values() if p is not None]
    for key, taken in after.items():
        if before.get(key) != taken and not _all_in(_parts(attributes.get(key)), parameters):
            raise CaptureError(
                f"forward changes {name}.{key}, or what is in it, which a captured graph would "
                f"freeze; keep a count in a registered buffer, draw random numbers with torch, or "
                f"change it outside forward"
            )


def _refuse_leaked(name: str, owner: torch.nn.Module) -> None:
    for hook in (*owner._forward_hooks.values(), *owner._forward_pre_hooks.values()):
        if any(is_traced_tensor(part) for item in _reachable(hook) for part in _parts(item)):
            raise CaptureError(
                f"a hook of {name} stores a tensor, where a replay would leave it stale; "
                f"return the tensor from forward instead, or remove the hook"
            )


def _reachable(hook: Any) -> Iterator[Any]:
    """Yield what a hook can store to: its variables, and the attributes of objects in them."""
    if isinstance(hook, functools.partial):
        yield from _reachable(hook.func)
        held = [*hook.args, *hook.keywords.values()]
    elif inspect.isroutine(hook):
        held = [getattr(hook, "__self__", None)]
        if inspect.isfunction(function := getattr(hook, "__func__", hook)):
            variables = inspect.getclosurevars(function)
            held += [*variables.nonlocals.values(), *variables.globals.values()]
    else:
        held = [hook]
    for item in held:
        yield item
        if not isinstance(item, (type, types.ModuleType, torch.nn.Module)):
            yield from list(getattr(item, "__dict__", {}).values())


def _all_in(parts: list[Any], tensors: list[torch.Tensor]) -> bool:
    return bool(parts) and all(any(part is tensor for tensor in tensors) for part in parts)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


@contextmanager
def _not_seeded() -> Iterator[None]:
    """Refuse a forward that seeds, also one that forks the generators first."""
    tracing, manual_seed = threading.get_ident(), torch.manual_seed

    def refuse(seed: Any) -> torch.Generator:
        return _refuse_seed() if threading.get_ident() == tracing else manual_seed(seed)

    torch.manual_seed = torch.random.manual_seed = refuse
    try:
        yield
    finally:
        torch.manual_seed = torch.random.manual_seed = manual_seed
    if torch.default_generator.initial_seed() != _TRACING_SEED:
        _refuse_seed()


def _refuse_seed() -> NoReturn:
    raise CaptureError(
        "forward seeds torch's global random generator, which a captured graph would not "
        "repeat; seed it outside forward"
    )


def _refuse_lost_dropout(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if not (isinstance(part, torch.nn.RNNBase) and part.training):
            continue
        if part.dropout and part.num_layers > 1:
            raise CaptureError(
                f"{name or type(part).__name__} has dropout={part.dropout} between its layers, "
                f"which torch loses when it traces an RNN; stack RNNs of one layer each, with "
                f"nn.Dropout between them"
            )


def _refuse_old_norms(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, (WeightNorm, SpectralNorm)):
                norm = type(hook).__module__.rpartition(".")[2]
                raise CaptureError(
                    f"{name or type(part).__name__} has torch.nn.utils.{norm}, which replaces a "
                    f"tensor in forward; use torch.nn.utils.parametrizations.{norm} instead"
                )


@contextmanager
def _rnn_in_steps() -> Iterator[None]:
    """Trace an LSTM on the CPU as the operators of its steps.

    oneDNN's fused layer keeps what its backward needs only where gradients are on, in a workspace
    of no declared type.
    """
    flags: Any = torch.backends.mkldnn
    before = flags.enabled
    flags.enabled = False
    try:
        yield
    finally:
        flags.enabled = before


@contextmanager
def _no_hidden_draws() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state(legacy=False)
    torch_state = torch.get_rng_state()
    torch.default_generator.manual_seed(_TRACING_SEED)
    try:
        yield
        changed = random.getstate() != python_state
        if numpy is not None:
            changed = changed or _digest(numpy.random.get_state(legacy=False)) != _digest(
                numpy_state
            )
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
    if changed:
        raise CaptureError(
            "forward draws random numbers from Python's random or numpy, which a captured graph "
            "would freeze; draw them with torch, or pass them in as arguments"
        )


def _digest(numpy_state: Any) -> tuple[bytes, int]:
    inner = numpy_state["state"]
    return inner["key"].tobytes(), inner["pos"]
