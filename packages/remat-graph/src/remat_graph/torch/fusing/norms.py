"""Batch norms as the ops that they are made of, so that compilers join these with their neighbours.

The traced op also makes running statistics anew from those that are written later, so it could not
run again. Apart, mean and deviation of the batch are reductions of what is normalised, the rest is
pointwise, and running statistics are an op of their own, which runs once. The backward is one op.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat_graph.torch.calls import Call, TensorFacts, Variable
from remat_graph.torch.kernels.batch_norm import running_statistics
from remat_graph.torch.lowering import equivalence_of
from remat_graph.torch.program import Program

__all__ = ["norms_apart"]

aten = torch.ops.aten

_SHORT = (torch.float16, torch.bfloat16)


def norms_apart(program: Program, unfused: Collection[str]) -> tuple[Program, Mapping[str, str]]:
    """Write a program without alternatives anew, with each batch norm in parts but those `unfused`.

    Says of the new ops which op they are a part of; the one that gives its result has its name.
    """
    norms = {
        op: _Parts(op, call, program.facts)
        for op, call in program.calls.items()
        if op not in unfused and _is_of_batch(call, program.facts)
    }
    if not norms:
        return program, {}
    calls, order = dict[str, Call](), list[str]()
    for op in program.order:
        parts = norms[op].calls if op in norms else {}
        order += parts or [op]
        if op in program.calls:
            calls.update(parts or {op: program.calls[op]})
    storage, facts, views = dict(program.storage), dict(program.facts), dict(program.views)
    for norm in norms.values():
        facts.update(norm.facts)
        views.update(norm.views)
        storage.update((name, name) for name in norm.facts)
        storage.update((name, storage[call.reads[0]]) for name, call in norm.views.items())
    part_of = {new: op for op, norm in norms.items() for new in norm.calls}
    origin = program.provenance
    return replace(
        program,
        calls=calls,
        views=views,
        order=tuple(order),
        storage=storage,
        facts=facts,
        equivalence={
            op: equivalence_of(call, facts) if op in part_of else program.equivalence[op]
            for op, call in calls.items()
        },
        rounding=program.rounding | part_of.keys(),
        provenance={**origin, **{n: origin[op] for n, op in part_of.items() if op in origin}},
    ), part_of


def _is_of_batch(call: Call, facts: Mapping[str, TensorFacts]) -> bool:
    """Whether a call is a batch norm in training, in the layout of what it normalises.

    Mean and deviation are in 32 bits at least.
    """
    if call.target is not aten._native_batch_norm_legit_functional.default:
        return False
    result, *saved = call.results[:3]
    training, momentum = call.args[5:7]
    if result is None or training is not True or not isinstance(momentum, float):
        return False
    x = facts[call.args[0].name]
    count = math.prod(x.shape) // x.shape[1] if len(x.shape) > 1 and x.shape[1] else 0
    own = torch.float32 if x.dtype in _SHORT else x.dtype  # else they are rounded to 16 bits
    has_long = all(name is None or facts[name].dtype is own for name in saved)
    return count > 1 and has_long and x.stride == facts[result].stride


@dataclass
class _Parts:
    """The calls of one batch norm, by op, with the variables that they add and the views.

    How tensors lie is read off tensors without data, on which the operators are run.
    """

    op: str
    call: Call
    before: Mapping[str, TensorFacts]
    calls: dict[str, Call] = field(default_factory=dict)
    views: dict[str, Call] = field(default_factory=dict)
    facts: dict[str, TensorFacts] = field(default_factory=dict)
    _empty: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        x, weight, bias, mean, var, _, momentum, eps = self.call.args
        result, saved_mean, saved_deviation, new_mean, new_var = self.call.results
        shape, dtype = self.before[x.name].shape, self.before[x.name].dtype
        axes = [axis for axis in range(len(shape)) if axis != 1]
        is_short = dtype in _SHORT
        if is_short:
            (x,) = self._add(aten._to_copy.default, x, names=("longer",), dtype=torch.float32)
        var_of_batch, mean_of_batch = self._add(
            aten.var_mean.correction, x, axes, names=("var", "mean"), correction=0, keepdim=True
        )
        (shifted,) = self._add(aten.add.Tensor, var_of_batch, eps, names=("shifted",))
        (deviation,) = self._add(aten.rsqrt.default, shifted, names=("deviation",))
        (y,) = self._add(aten.sub.Tensor, x, mean_of_batch, names=("centred",))
        (y,) = self._add(aten.mul.Tensor, y, deviation, names=("normal",))
        of_channels = [shape[1], *[1] * (len(shape) - 2)]
        for name, operator, affine in (
            ("scaled", aten.mul.Tensor, weight),
            ("moved", aten.add.Tensor, bias),
        ):
            if affine is not None:
                channels = self._view(f"{self.op}__by_{name}", affine, of_channels)
                (y,) = self._add(operator, y, channels, names=(name,))
        if is_short:
            (y,) = self._add(aten._to_copy.default, y, names=("shorter",), dtype=dtype)
        del self.facts[y.name]
        self.calls[self.op] = replace(self.calls.pop(y.name), results=(result,))
        for saved, of in ((saved_mean, mean_of_batch), (saved_deviation, deviation)):
            if saved is not None:
                self._view(saved, of, [shape[1]])
        if new_mean is not None or new_var is not None:
            sizes = [shape[axis] for axis in axes]
            args = mean, var, mean_of_batch, var_of_batch, sizes, momentum
            self.calls[f"{self.op}__running"] = Call(
                running_statistics, args, {}, (new_mean, new_var), sequence=True
            )

    def _add(
        self, operator: Any, *args: Any, names: tuple[str, ...], **kwargs: Any
    ) -> list[Variable]:
        """Add a call that makes variables with these names behind that of the op."""
        names = tuple(f"{self.op}__{name}" for name in names)
        made = operator(*map(self._tensor, args), **kwargs)
        for name, tensor in zip(names, made if len(names) > 1 else [made], strict=True):
            self._note(name, tensor)
        self.calls[names[-1]] = Call(operator, args, kwargs, names, sequence=len(names) > 1)
        return [*map(Variable, names)]

    def _view(self, name: str, of: Variable, shape: list[int]) -> Variable:
        """Add a view."""
        self.views[name] = Call(aten.view.default, (of, shape), {}, (name,), sequence=False)
        self._note(name, self._tensor(of).view(shape))
        return Variable(name)

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        device = self.before[self.call.args[0].name].device
        self._empty[name] = tensor
        self.facts[name] = replace(TensorFacts.of(tensor), device=device)

    def _tensor(self, item: Any) -> Any:
        """Give a tensor without data in the place of a variable."""
        if not isinstance(item, Variable):
            return item
        if item.name not in self._empty:
            facts = self.before[item.name]
            self._empty[item.name] = torch.empty_strided(
                facts.shape, facts.stride, dtype=facts.dtype, device="meta"
            )
        return self._empty[item.name]
