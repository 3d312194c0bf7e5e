"""The gradient of an output that the model also reads itself: no part of it is taken for the whole.

A plan adds up what comes from outside and from the model's own reading. Autograd sees what comes
from outside alone. So in autograd's graph, what is computed from such an output gives it a
`PartialGradient`, which takes the place of their sum, and carries what came from outside to the
backward of the plan. Hooks, `retain_grad`, `autograd.grad` and gradient edges get it, too: whoever
reads it is refused, and so is a hook that puts another gradient in its place.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch._dynamo import eval_frame
from torch.autograd.graph import _engine_run_backward
from torch.utils import _pytree as pytree

from remat_exec.deferred import DeferredTensor
from remat_exec.errors import BackwardError, PartialGradientAsked
from remat_exec.inner_reads import InnerReads
from remat_exec.outputs import Outputs
from remat_graph.torch import Program, TensorFacts

__all__ = ["Asked", "PartialGradient", "connect"]

Asked = Callable[[frozenset[int]], bool]
"""Gets the positions of outputs whose whole gradients are asked for; says if they will be there."""

aten = torch.ops.aten

_MOST_LAYOUTS = 256  # of stand-ins that are described at a time

_ENGINE = _engine_run_backward.__code__
_BETWEEN = frozenset({"__torch_dispatch__", "__torch_function__"})
_FILES_BETWEEN = frozenset({torch._ops.__file__, torch._compile.__file__, eval_frame.__file__})
_SHARED = frozenset({aten.clone.default, aten.detach.default, aten.alias.default})
_BY_SIZES = frozenset({aten.view.default, aten._unsafe_view.default})
_BY_STRIDES = frozenset({aten.as_strided.default, aten.view_as_complex.default})


@dataclass(eq=False)
class _Source:
    """An output of one step that the model reads, and what stands for its gradient.

    `refuse` is called with the positions of such outputs whose gradients are asked for. `task` is
    the backward that has met a reader of it.
    """

    at: int
    facts: TensorFacts
    device: torch.device
    refuse: Callable[[frozenset[int]], NoReturn]
    task: int | None = None
    gradients: WeakSet[PartialGradient] = field(default_factory=WeakSet)


class PartialGradient(DeferredTensor):
    """Stands for the gradients of outputs, `of` whose readers within the model it came.

    Autograd adds what comes from `outside` to it, and views it as the outputs were viewed.
    """

    of: frozenset[_Source]
    outside: torch.Tensor | None

    @classmethod
    def stand_for(
        cls, like: torch.Tensor, of: frozenset[_Source], outside: torch.Tensor | None
    ) -> PartialGradient:
        """Stand for a gradient of the sizes, strides and type of `like`."""
        device = next(iter(of)).device
        made = cls.like(like, device, functools.partial(_refuse, of))
        made.of, made.outside = of, outside
        for source in of:
            source.gradients.add(made)
        return made

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let autograd itself add to it, and view and copy it.

        Raises:
            BackwardError: if anybody else reads it.
        """
        if not _is_autograd(inspect.currentframe()):
            return super().__torch_dispatch__(func, types, args, kwargs)
        with torch.inference_mode(mode=False):
            return _run(func, args, kwargs or {})


def _is_autograd(frame: FrameType | None) -> bool:
    """Whether an operator was called by the engine, and not in a hook, or after the backward."""
    while frame is not None and _leads_on(frame.f_code):
        frame = frame.f_back
    return frame is None or frame.f_code is _ENGINE


def _leads_on(code: CodeType) -> bool:
    """Whether code is between a call of an operator and what runs it, as that of a mode is."""
    return code.co_name in _BETWEEN or code.co_filename in _FILES_BETWEEN


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator of autograd's on what came from outside."""
    if func is aten.add.Tensor and not kwargs and _lie_alike(*args):
        like = _copy_of(args[0].size(), args[0].stride(), args[0].dtype)
        outside = _sum(args[0].outside, args[1].outside)
        return PartialGradient.stand_for(like, args[0].of | args[1].of, outside)
    found = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, PartialGradient)]
    of = frozenset().union(*(each.of for each in found))
    outside = _run_outside(func, args, kwargs, found)
    metas = pytree.tree_map_only(torch.Tensor, _meta, (args, kwargs))
    likes, structure = pytree.tree_flatten(func(*metas[0], **metas[1]))
    parts = [None] * len(likes) if outside is None else pytree.tree_leaves(outside)
    made = [
        PartialGradient.stand_for(like, of, part)
        if like.is_floating_point() or like.is_complex()
        else part
        for like, part in zip(likes, parts, strict=True)
    ]
    return pytree.tree_unflatten(made, structure)


def _run_outside(func: Any, args: Any, kwargs: dict[str, Any], found: list[PartialGradient]) -> Any:
    """Run an operator, which is linear, on the parts from outside; `None` if none came.

    Autograd chose it for what the sum is like. A part may lie in another way, such as transposed.
    """
    if func in _SHARED:
        return args[0].outside
    if func is aten.add.Tensor:
        return _sum(*(a.outside if isinstance(a, PartialGradient) else a for a in args))
    if all(each.outside is None for each in found) and func is not aten.isnan.default:
        return None
    part_of = _part_that_lies_like if func in _BY_STRIDES else _part_of
    args, kwargs = pytree.tree_map_only(PartialGradient, part_of, (args, kwargs))
    return (aten.reshape.default if func in _BY_SIZES else func)(*args, **kwargs)


def _lie_alike(one: Any, other: Any) -> bool:
    """Whether both are partial gradients that lie in the same way: their sum lies as a copy does.

    That is so for nearly all that autograd adds up. To ask torch takes ten times as long.
    """
    return (
        isinstance(one, PartialGradient)
        and isinstance(other, PartialGradient)
        and one.dtype == other.dtype
        and one.size() == other.size()
        and one.stride() == other.stride()
    )


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other


def _part_of(gradient: PartialGradient) -> torch.Tensor:
    return _empty_like(gradient).zero_() if gradient.outside is None else gradient.outside


def _part_that_lies_like(gradient: PartialGradient) -> torch.Tensor:
    part = _part_of(gradient)
    if part.stride() == gradient.stride():
        return part
    return _empty_like(gradient).copy_(part)


def _empty_like(gradient: PartialGradient) -> torch.Tensor:
    like = _meta(gradient)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=gradient.device)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return _described(tensor.size(), tensor.stride(), tensor.dtype)


@functools.lru_cache(maxsize=_MOST_LAYOUTS)
def _described(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Give a tensor without data that lies so, and to which nobody writes; no mode has made it."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


@functools.lru_cache(maxsize=_MOST_LAYOUTS)
def _copy_of(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Give a tensor without data that lies as a copy does, and the sum of two that lie so."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_like(_described(shape, stride, dtype))


def _refuse(of: frozenset[_Source]) -> NoReturn:
    next(iter(of)).refuse(frozenset(source.at for source in of))


@dataclass(eq=False)
class _Refusal:
    """Refuses who asks for the gradients of outputs of a step, and tells of it.

    All outputs are told of whose gradients somebody waits for: `tensors` has the outputs, by
    position, and `sources` what is known of them.
    """

    asked: Asked | None
    tensors: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    sources: list[weakref.ref[_Source]] = field(default_factory=list)

    def __call__(self, outputs: frozenset[int]) -> NoReturn:
        shown = ", ".join(map(str, sorted(outputs)))
        waited_for = outputs | {at for at, ref in self.tensors.items() if _is_waited_for(ref())}
        if torch._C._current_graph_task_id() == -1:  # who holds one got it of a backward
            sources = (ref() for ref in self.sources)
            waited_for |= {source.at for source in sources if source and len(source.gradients)}
        instead = (
            "end the region by torch._dynamo.graph_break() in the forward where the output is there"
        )
        kind = BackwardError
        if self.asked is not None and self.asked(waited_for):
            kind = PartialGradientAsked
            instead = "run forward again, it will be planned anew, and autograd has the whole then"
        raise kind(
            f"the gradient of output {shown} of a region is asked for, by a hook, retain_grad or "
            f"autograd.grad. The region reads that output itself, too, so autograd has only the "
            f"part that comes from outside; {instead}. If that part is meant, return "
            f"output.clone() from the model"
        )


def _is_waited_for(output: torch.Tensor | None) -> bool:
    """Whether an output has hooks, or retains its gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return output is not None and bool(output._backward_hooks or output.retains_grad)


class _Output(torch.autograd.Function):
    """Hands out an output; gives those that it is computed from a `PartialGradient` each."""

    @staticmethod
    def forward(
        ctx: Any,
        own: tuple[_Source, ...],
        read: tuple[_Source, ...],
        tensor: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.own, ctx.read = own, read
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        task = torch._C._current_graph_task_id()
        gradients: list[torch.Tensor | None] = [None] * len(ctx.read)
        if gradient is not None:
            for at, source in enumerate(ctx.read):
                source.task = task
                facts = source.facts
                like = _described(facts.shape, facts.stride, facts.dtype)
                gradients[at] = PartialGradient.stand_for(like, frozenset((source,)), None)
        return None, None, _from_outside(ctx.own, task, gradient), *gradients


def _from_outside(
    own: Iterable[_Source], task: int, gradient: torch.Tensor | None
) -> torch.Tensor | None:
    """Give what came from outside, and let go of it wherever else it is held.

    Raises:
        BackwardError: if this is not what was to come, as if a hook gives another gradient.
    """
    met = frozenset(source for source in own if source.task == task)
    of = gradient.of if isinstance(gradient, PartialGradient) else frozenset()
    if of != met:
        _refuse(of | met)
    if not isinstance(gradient, PartialGradient):
        return gradient
    outside = gradient.outside
    for each in {each for source in met for each in source.gradients}:
        each.outside = None
    return outside


def _gate(source: _Source, whole: torch.Tensor) -> torch.Tensor:
    """Give a view of an input to which only what comes from outside goes on, for an output of it.

    It stays a view for autograd, as the input may be changed in place through it.
    """
    view: torch.Tensor = aten.alias.default(whole)
    if view.grad_fn is not None:
        view.grad_fn.register_prehook(functools.partial(_take_out, source))
    return view


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _take_out(
    source: _Source, gradients: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    task = torch._C._current_graph_task_id()
    return (_from_outside((source,), task, gradients[0]),)


def connect(
    outputs: Outputs,
    program: Program,
    reads: InnerReads,
    handed: Sequence[torch.Tensor],
    asked: Asked | None,
) -> None:
    """Connect outputs, of which none was made yet, to those that they are computed from.

    `handed` is what autograd was handed. `asked` is told of who is refused.
    """
    refuse = _Refusal(asked)
    sources = {
        at: _Source(at, program.facts[program.outputs[at].variable], program.device, refuse)
        for items in (*reads.of.values(), reads.of_inputs)
        for at in items
    }
    refuse.sources += map(weakref.ref, sources.values())

    def of(items: Iterable[int]) -> tuple[_Source, ...]:
        return tuple(sources[at] for at in items)

    for at in reads.of_inputs:
        outputs.view_through(at, functools.partial(_gate, sources[at]))
    apply: Any = _Output.apply
    for position, read in reads.by.items():
        tensors = (outputs[at] for at in read)
        tensor = apply(of(reads.of[position]), of(read), handed[position], *tensors)
        outputs.replace(position, tensor)
    refuse.tensors.update((at, weakref.ref(outputs[at])) for at in sources)
