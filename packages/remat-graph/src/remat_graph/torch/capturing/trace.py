"""From a module or a region and its example inputs to a joint graph: flat tensors in and out.

A module's own `forward` runs under tracing, for plans that are not run. A buffer that it replaces
becomes an update in place; all else that it stores, and the random generators, are put back. Where
tensors hold no data, others stand in for them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat_graph.torch.capturing.checks import check_traceable
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.process import generators_restored, process_lock
from remat_graph.torch.repeats.blocks import Repeat, candidates, find_repeats, passed_over
from remat_graph.torch.repeats.noting import Run, forwards_replaced
from remat_graph.torch.repeats.rows import shortened
from remat_graph.torch.tracing.aot import let_other_threads_compile, trace_joint, try_start
from remat_graph.torch.tracing.as_on_cuda import as_on_cuda
from remat_graph.torch.tracing.caches import caches_within, tensors_forgotten
from remat_graph.torch.tracing.data_writes import DataWriter
from remat_graph.torch.tracing.fakes import StandIns
from remat_graph.torch.tracing.inner_gradients import HooksRefused
from remat_graph.torch.tracing.joint import Joint, Key
from remat_graph.torch.tracing.lstm_in_layers import LstmInLayers
from remat_graph.torch.tracing.positions import positions_as_indices
from remat_graph.torch.tracing.provenance import NotedModules
from remat_graph.torch.tracing.restoring import left_as_it_was
from remat_graph.torch.tracing.rnns import RnnInSteps
from remat_graph.torch.tracing.structure import FlatCall, Structure, flatten

__all__ = [
    "FlatRegion",
    "Traced",
    "original_forward",
    "original_forwards",
    "trace",
    "trace_region",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A joint graph, how the forward returns its tensors, and the rows of blocks traced in part."""

    joint: Joint
    structure: Structure
    repeats: tuple[Repeat, ...]


def trace(
    module: torch.nn.Module,
    call: FlatCall,
    *,
    whole: bool = False,
    capability: tuple[int, int] | None = None,
    lstms_in_steps: bool = False,
) -> Traced:
    """Trace a call of `module.forward` and its backward pass.

    Of blocks that do the same few are traced, unless it is to be `whole`. With the compute
    `capability` of a CUDA device, it is traced on the host with the operators of such a device.
    There LSTMs run step by step, and elsewhere if `lstms_in_steps`.

    Raises:
        CaptureError: if the forward cannot be one static graph.
    """
    check_traceable(module, on_cuda=capability is not None)
    flat = _FlatModule(module, call, capability, lstms_in_steps=lstms_in_steps)
    with (
        process_lock,
        generators_restored(),
        original_forwards(module),
        left_as_it_was(module),
    ):
        repeats: tuple[Repeat, ...] = ()
        rows = {} if whole else candidates(module)

        @contextmanager
        def few_traced() -> Iterator[None]:
            nonlocal repeats
            repeats = ()
            if rows:
                with flat.stopping_at(rows):
                    try_start(flat, flat.inputs)
                repeats = find_repeats(module, rows, *flat.without_data())
            between = {key: like for repeat in repeats for key, like in repeat.own_between.items()}
            with passed_over(module, repeats), flat.leaving_out(between):
                yield

        @contextmanager
        def as_compiled() -> Iterator[None]:  # as TorchDynamo does, for code that asks
            with torch.compiler._compile_session_context(), few_traced():
                yield

        joint = trace_joint(flat, flat.inputs, as_compiled)
    if flat.output_structure is None:
        raise CaptureError("the forward pass was not run")
    return Traced(flat.name_inputs(joint), flat.output_structure, repeats)


class FlatRegion(torch.nn.Module):
    """A function of a flat list of inputs, as a module whose inputs are distinct tensors alone.

    Of a graph only a few of the periods that do the same are run, unless all are asked for: see
    `repeats` for the rest. LSTMs are in the layers that eager runs, or all `lstms_in_steps`.
    """

    def __init__(
        self,
        region: Callable[..., Any],
        inputs: Sequence[Any],
        tensors: list[torch.Tensor],
        *,
        whole: bool,
        lstms_in_steps: bool = False,
    ) -> None:
        super().__init__()
        self.repeats: tuple[Repeat, ...] = ()
        self.lstms_in_steps = lstms_in_steps
        position = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._inputs = [position.get(id(item), item) for item in inputs]
        self._is_tensor = [id(item) in position for item in inputs]
        if isinstance(region, torch.fx.GraphModule):
            if not whole:
                placeholders = region.graph.find_nodes(op="placeholder")
                tensor_at = {
                    node: (("input", position[id(item)]), item)
                    for node, item in zip(placeholders, inputs, strict=True)
                    if isinstance(item, torch.Tensor)
                }
                region, self.repeats = shortened(region, tensor_at)
            region = DataWriter(region).run
        self._region = region
        _, self.output_structure = flatten(())

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Give the tensors that the function returns."""
        let_other_threads_compile()
        items = zip(self._inputs, self._is_tensor, strict=True)
        with positions_as_indices() as check:
            result = self._region(
                *(tensors[item] if is_tensor else item for item, is_tensor in items)
            )
        leaves, self.output_structure = flatten(result)
        check(leaves, tensors)
        return leaves


def trace_region(region: FlatRegion, tensors: list[torch.Tensor]) -> Joint:
    """Trace a region and its backward pass.

    Raises:
        CaptureError: if it cannot be one static graph.
    """
    layers = nullcontext() if region.lstms_in_steps else LstmInLayers()
    with process_lock, RnnInSteps(), layers:
        return trace_joint(region, [_as_leaf(tensor) for tensor in tensors])


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Cut a tensor off from what made it: torch warns where it reads `.grad` of one that is not."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_leaf:  # else a symbol
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


class _FlatModule(torch.nn.Module):
    """`module` as a function from a flat list of tensors to a flat list of tensors.

    Tensors that are plain attributes of a module are lifted to inputs of the graph, as buffers are.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        call: FlatCall,
        capability: tuple[int, int] | None,
        *,
        lstms_in_steps: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self._capability, self._lstms_in_steps = capability, lstms_in_steps
        self._stand_ins = StandIns()
        self.training = module.training
        self._call = call
        self._caches = caches_within(module)
        self._lifted = [
            (f"{name}.{key}".removeprefix("."), owner, key)
            for name, owner in module.named_modules()
            for key, value in owner.__dict__.items()
            if isinstance(value, torch.Tensor)
        ]
        for index, (_, owner, key) in enumerate(self._lifted):
            self.register_buffer(f"lifted_{index}", _as_leaf(owner.__dict__[key]))
        self._attributes = {f"lifted_{at}": name for at, (name, *_) in enumerate(self._lifted)}
        self._hidden: set[int] = set()
        self._left_out: dict[Key, Key] = {}
        self.inputs = [self._stand_ins.of(_as_leaf(tensor)) for tensor in call.tensors]
        named = itertools.chain(module.named_parameters(), module.named_buffers())
        self._hooked = {name for name, own in named if own._backward_hooks}
        self._hooked_inputs = [at for at, own in enumerate(call.tensors) if own._backward_hooks]
        self.output_structure: Structure | None = None

    @contextmanager
    def stopping_at(self, rows: Mapping[str, str]) -> Iterator[None]:
        """Let the forward raise `CaptureError` at the first block of these rows."""

        def stop(*_: Any, **__: Any) -> None:
            raise CaptureError("the first block is reached")

        within = tuple({f"{container}." for container in rows.values()})
        own = [key for key, _ in self._own() if str(key[1]).startswith(within)]
        blocks = (self.module.get_submodule(name) for name in rows)
        with forwards_replaced((block, stop) for block in blocks), self._without(own):
            yield

    @contextmanager
    def leaving_out(self, like: Mapping[Key, Key]) -> Iterator[None]:
        """Trace without inputs that nothing reads; each looks like another, which stays."""
        with self._without(like) as left_out:
            self._left_out = {key: like[key] for key in left_out}
            yield

    @contextmanager
    def _without(self, keys: Collection[Key]) -> Iterator[set[Key]]:
        """Name fewer parts: those of these that are no others besides."""
        own = list(self._own())
        times = Counter(id(tensor) for _, tensor in own)
        times.update(map(id, self.inputs))
        left_out = {key: id(tensor) for key, tensor in own if times[id(tensor)] == 1}
        left_out = {key: left_out[key] for key in keys if key in left_out}
        self._hidden = set(left_out.values())
        try:
            yield set(left_out)
        finally:
            self._hidden = set()

    def name_inputs(self, joint: Joint) -> Joint:
        """Name inputs as `module` does, and put in those that were left out."""
        node_of = {self._named(*role): node for node, role in joint.inputs.items()}
        keys = [key for key, _ in self._own()]
        keys += [("input", index) for index in range(len(self.inputs))]
        keys = [key for key in keys if key in node_of or key in self._left_out]  # else merged: tied
        last: torch.fx.Node | None = None
        for number, key in enumerate(keys):
            if key in self._left_out:
                with joint.graph.inserting_after(last):
                    node_of[key] = joint.graph.placeholder("")
                node_of[key].meta = dict(node_of[self._left_out[key]].meta)
            last = node_of[key]
            last.name = last.target = f"primals_{number + 1}"
        return dataclasses.replace(joint, inputs={node_of[key]: key for key in keys})

    def _own(self) -> Iterator[tuple[Key, torch.Tensor]]:
        for name, parameter in self.named_parameters():
            yield self._named("parameter", name), parameter
        for name, buffer in self.named_buffers():
            yield self._named("buffer", name), buffer

    def _named(self, kind: str, key: str | int) -> Key:
        if isinstance(key, str) and key in self._attributes:
            return "attribute", self._attributes[key]
        return kind, key.removeprefix("module.") if isinstance(key, str) else key

    def without_data(self) -> tuple[Run, dict[str, tuple[Key, torch.Tensor]]]:
        """Give what runs the forward on fake tensors, and these: of its own, and of the call."""
        parts = {
            name: (self._named(kind, name), self._stand_ins.without_data(tensor))
            for kind, named in (("parameter", self.named_parameters()),
                                ("buffer", self.named_buffers()))
            for name, tensor in named
        }  # fmt: skip
        own = set(parts)
        for index, tensor in enumerate(self.inputs):
            parts[f"input {index}"] = ("input", index), self._stand_ins.without_data(tensor)

        def run(parts: Mapping[str, torch.Tensor], within: TorchDispatchMode) -> list[torch.Tensor]:
            swapped = {name: tensor for name, tensor in parts.items() if name in own}
            call = tuple(parts[f"input {index}"] for index in range(len(self.inputs)))
            with self._stand_ins.in_place_of_new(), within:
                result: list[torch.Tensor] = torch.func.functional_call(self, swapped, call)
            return result

        return run, parts

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Name each parameter once for each module that has it.

        A module that stands at two places is one module: swapping its parameters once for each
        place, as `remove_duplicate=False` has it, would leave the first swap in the user's model.
        """
        for name, owner in self.module.named_modules(prefix=f"{prefix}.module".lstrip(".")):
            for key, own in owner.named_parameters(name, recurse=False, remove_duplicate=False):
                stand_in = self._stand_ins.of(own)
                if id(stand_in) not in self._hidden:
                    yield key, cast("torch.nn.Parameter", stand_in)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Name each buffer once for each module that has it."""
        own = [super().named_buffers(prefix, recurse=False, remove_duplicate=False)]
        for name, owner in self.module.named_modules(prefix=f"{prefix}.module".lstrip(".")):
            own.append(owner.named_buffers(name, recurse=False, remove_duplicate=False))
        for key, buffer in itertools.chain.from_iterable(own):
            stand_in = self._stand_ins.of(buffer)
            if id(stand_in) not in self._hidden:
                yield key, stand_in

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = self._call.rebuild(tensors)
        # It is run several times, and is to do the same.
        with tensors_forgotten(self._caches), left_as_it_was(self.module):
            for index, (_, owner, key) in enumerate(self._lifted):
                owner.__dict__[key] = getattr(self, f"lifted_{index}")
            noted = NotedModules(self.module, _FlatModule.forward.__code__)
            elsewhere = self._elsewhere()
            replaced = _replaced_buffers_written_in_place(self.module)
            hooks = self._hooks_refused(tensors)
            with replaced, RnnInSteps(), hooks, elsewhere, positions_as_indices() as check, noted:
                result = original_forward(self.module)(*args, **kwargs)
            own = (*self.module.parameters(), *self.module.buffers())
        leaves, self.output_structure = flatten(result)
        check(leaves, (*tensors, *own))
        return leaves

    def _elsewhere(self) -> AbstractContextManager[Any]:
        if self._capability is not None:
            return as_on_cuda(self._capability)
        return nullcontext() if self._lstms_in_steps else LstmInLayers()

    def _hooks_refused(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        named = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        hooked = {id(own): name for name, own in named if name in self._hooked}
        hooked |= {id(tensors[at]): f"tensor {at} of its call" for at in self._hooked_inputs}
        return HooksRefused(hooked) if hooked else nullcontext()


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
