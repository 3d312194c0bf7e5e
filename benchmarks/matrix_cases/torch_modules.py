"""The modules of torch's own tests, each with the calls that those tests make of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from matrix_cases.case import Built, Case, output_loss, seed_everything, tensors_in

__all__ = ["case", "names"]

MOST_VARIANTS = 6


def _database() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db  # noqa: PLC0415

    # Importing torch's tests forbids to set flags of back ends, for the rest of the process.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return {info.name.removeprefix("nn."): info for info in module_db}


def names() -> list[str]:
    """List the modules."""
    return [f"modules/{name}" for name in _database()]


def _inputs(info: Any) -> list[Any]:
    seed_everything(0)
    return list(
        info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
        )
    )


def _own_leaf(value: object) -> object:
    """Cut an input off the graph that it was made by, which can be differentiated only once."""
    if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
        return value.detach().requires_grad_()
    return value


def _build(info: Any, index: int) -> Built:
    chosen = _inputs(info)[index]
    constructor, call = chosen.constructor_input, chosen.forward_input
    seed_everything(0)
    module = info.module_cls(*constructor.args, **constructor.kwargs)
    module.train()
    args, kwargs = tree_map(_own_leaf, (tuple(call.args), dict(call.kwargs)))
    if info.is_lazy:
        with torch.no_grad():
            module(*args, **kwargs)  # its parameters are made at its first call
    leaves = tuple(t for t in tensors_in([args, kwargs]) if t.requires_grad and t.is_leaf)
    return Built(module, args, kwargs, leaves, output_loss())


def case(name: str) -> Case:
    """Make the case of one module: calls spread over those of its tests.

    Raises:
        KeyError: if there is none.
    """
    info = _database()[name]

    def variants() -> list[tuple[str, Callable[[], Built]]]:
        inputs = _inputs(info)
        count = min(MOST_VARIANTS, len(inputs))
        chosen = [index * len(inputs) // count for index in range(count)]
        return [
            (f"{index} {inputs[index].desc}".strip(), functools.partial(_build, info, index))
            for index in chosen
        ]

    return Case(f"modules/{name}", variants)
