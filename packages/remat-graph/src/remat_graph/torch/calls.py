"""Calls of operators, and the variables that they read and make."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isfunction, signature
from typing import Any

import torch

__all__ = [
    "GENERATOR_STATE_BYTES",
    "Body",
    "Call",
    "TensorFacts",
    "Variable",
    "allocated_bytes",
    "at_numbers",
    "filled",
    "is_view",
    "spanned_bytes",
    "state_bytes",
]

GENERATOR_STATE_BYTES = 5056  # of torch's CPU generator

_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype})  # most arguments: no variables


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor of the program, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What is known of a variable before it is computed; sizes in elements, storage in bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        """Read them off a tensor, which may hold no data."""
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
            int(tensor.untyped_storage().nbytes()),
        )

    @property
    def is_whole(self) -> bool:
        """Whether a tensor has all elements of its memory, each once."""
        own_bytes = math.prod(self.shape) * self.dtype.itemsize
        return self.storage_bytes == own_bytes and self.is_distinct

    @property
    def is_distinct(self) -> bool:
        """Whether strides show that no two elements are the same memory."""
        reach = 0
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if step <= reach:
                    return False
                reach += step * (size - 1)
        return True


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator. `args` and `kwargs` hold `Variable`s where tensors go.

    `results` are the variables that the call makes, in the order of what it returns; `None` for
    what nothing reads. `sequence` says whether it returns a tuple or list. `random` is the device
    whose generator it draws from. `replay` is the call to make when its results are made again.
    `workspace_bytes` is what it is known to take while it runs, for costs that are estimated.
    `body` is what a function that stands for several calls runs. `reads` are the variables that it
    reads.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[str | None, ...]
    sequence: bool
    random: torch.device | None = None
    replay: Call | None = None
    workspace_bytes: int = 0
    body: Body | None = None
    reads: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", tuple(dict.fromkeys(self.variables)))

    @property
    def name(self) -> str:
        """The name of the operator or function that is called."""
        return self.target.__name__ if isfunction(self.target) else str(self.target)

    @property
    def variables(self) -> list[str]:
        """The variables among the arguments, each as often as it stands there."""
        names: list[str] = []
        _list_variables((*self.args, *self.kwargs.values()), names)
        return names

    @property
    def argument_names(self) -> tuple[str, ...]:
        """What the schema calls the arguments that are given, in the order of `variables`."""
        return (*[*_parameters(self.target)][: len(self.args)], *self.kwargs)

    def argument(self, name: str) -> Any:
        """Give an argument of an operator by its name in the schema, or its default."""
        for position, (own, default) in enumerate(_parameters(self.target).items()):
            if own == name:
                if position < len(self.args):
                    return self.args[position]
                return self.kwargs.get(name, default)
        raise KeyError(f"{self.name} has no argument {name!r}")

    def with_arguments(self, changed: Mapping[str, Any]) -> Call:
        """Make the same call of an operator with other arguments, by their names in the schema."""
        args, kwargs = list(self.args), dict(self.kwargs)
        names = [*_parameters(self.target)]
        for name, item in changed.items():
            if names.index(name) < len(args):
                args[names.index(name)] = item
            else:
                kwargs[name] = item
        return replace(self, args=tuple(args), kwargs=kwargs)

    def of(self, variables: Iterable[str], results: tuple[str | None, ...]) -> Call:
        """Make the same call of other variables, as many; what it makes again is as it was."""
        names = iter(variables)
        args = _with_variables(self.args, names)
        kwargs = {key: _with_variables(item, names) for key, item in self.kwargs.items()}
        return Call(
            self.target, args, kwargs, results,
            self.sequence, self.random, self.replay, self.workspace_bytes, self.body,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Body:
    """A program within a program: its calls, views too, in order; what it reads and what it gives.

    Variables of a body are its own: a call of it hands over its inputs in their order.
    `overwrites` are pairs of an input and an output that is made in its buffer, if that ends there.
    """

    inputs: tuple[str, ...]
    calls: tuple[Call, ...]
    outputs: tuple[str, ...]
    overwrites: tuple[tuple[str, str], ...] = ()

    def numbered(self) -> tuple[Body, dict[str, str]]:
        """Name its variables in the order in which they appear: equal bodies are equal then.

        The new names are given by the old ones.
        """
        names: dict[str, str] = {}

        def of(name: str) -> str:
            return names.setdefault(name, f"v{len(names)}")

        inputs = tuple(map(of, self.inputs))
        calls = tuple(
            call.of(
                [of(name) for name in call.variables],
                tuple(None if name is None else of(name) for name in call.results),
            )
            for call in self.calls
        )
        outputs = tuple(map(of, self.outputs))
        overwrites = tuple((of(read), of(new)) for read, new in self.overwrites)
        return Body(inputs, calls, outputs, overwrites), names


def filled(item: Any, there: Mapping[str, Any]) -> Any:
    """Put what is there in the place of the variables of an argument."""
    if type(item) is Variable:
        return there[item.name]
    if isinstance(item, (list, tuple)):  # fx has a list of its own
        return [filled(part, there) for part in item]
    return item


def at_numbers(item: Any, numbers: Mapping[float, Any]) -> Any:
    """Put something else in the place of these numbers, in a call or its arguments."""
    if isinstance(item, Call):
        args, kwargs = at_numbers(item.args, numbers), at_numbers(dict(item.kwargs), numbers)
        return replace(item, args=args, kwargs=kwargs)
    if isinstance(item, (tuple, list)):
        return type(item)([at_numbers(part, numbers) for part in item])
    if isinstance(item, dict):
        return {key: at_numbers(part, numbers) for key, part in item.items()}
    return numbers.get(item, item) if type(item) in (int, float) else item


def spanned_bytes(
    shape: Sequence[Any], stride: Sequence[Any], offset: Any, dtype: torch.dtype
) -> Any:
    """Give the bytes of the memory of a tensor that is alone in it."""
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (0 if 0 in shape else offset + 1 + reach) * dtype.itemsize


def is_view(call: Call) -> bool:
    """Whether a call computes nothing, but views what it reads."""
    returns = getattr(call.target, "_schema", None)
    if call.target is torch.ops.aten._unsafe_view.default:  # whose schema does not say so
        return True
    return returns is not None and any(
        each.alias_info is not None and not each.alias_info.is_write for each in returns.returns
    )


@functools.lru_cache(4096)
def _parameters(target: Any) -> Mapping[str, Any]:
    """Give the parameters of an operator or function, in order, with their defaults."""
    if isfunction(target):
        return {each.name: each.default for each in signature(target).parameters.values()}
    return {each.name: each.default_value for each in target._schema.arguments}


def _list_variables(items: Iterable[Any], names: list[str]) -> None:
    for item in items:
        if type(item) in _PLAIN:
            continue
        if isinstance(item, Variable):
            names.append(item.name)
        elif isinstance(item, (tuple, list)):
            _list_variables(item, names)
        elif isinstance(item, dict):
            _list_variables(item.values(), names)


def _with_variables(item: Any, names: Iterator[str]) -> Any:
    if type(item) in _PLAIN:
        return item
    if isinstance(item, Variable):
        return Variable(next(names))
    if isinstance(item, (tuple, list)):
        return type(item)([_with_variables(part, names) for part in item])
    if isinstance(item, dict):
        return {key: _with_variables(part, names) for key, part in item.items()}
    return item


def state_bytes(call: Call | None, device: torch.device) -> int:
    """Memory that a replay takes to put the generator back: on CUDA it is not on the device."""
    drawing = call is not None and call.random is not None and call.random.type == "cpu"
    return GENERATOR_STATE_BYTES if drawing and device.type == "cpu" else 0


def allocated_bytes(facts: TensorFacts, device: torch.device) -> int:
    """Bytes that a buffer takes of the memory of the program's device: none if it is on the host.

    CUDA's allocator works in blocks of 512.
    """
    if facts.device.type != "cuda":
        return facts.storage_bytes if facts.device.type == device.type else 0
    return -(-facts.storage_bytes // 512) * 512
