"""The one door to AOTAutograd: every private name of torch that capture uses is in this file.

`trace_joint` gives the joint forward and backward graph of a function of a module, functionalised,
with the role of each input and output. Tried with torch 2.13.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._export.utils import _compiling_state_context
from torch._functorch._aot_autograd import descriptors as roles
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.function import BackwardCFunction
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import disable_autocast_cache
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from remat_graph.torch.draws import DrawnAnew, may_draw_in_order_of_dimensions
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.failures import depends_on_data, has_effects, not_traced

__all__ = [
    "Joint",
    "OutputRole",
    "StandIns",
    "autocast_as_traced",
    "failures_untold",
    "fake_constant",
    "fake_mode_of",
    "has_no_data",
    "is_custom_backward",
    "is_traced_tensor",
    "let_other_threads_compile",
    "new_fake",
    "saves_through_hooks",
    "trace_joint",
    "try_start",
    "without_modes",
]

_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


Layout: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], int]"


@dataclass(frozen=True, slots=True)
class OutputRole:
    """How a tensor that the user gets comes about.

    `kind` is `fresh`, `input` (the placeholder `base` itself), `input_view` (a view of it) or
    `view` (a view of `base`, another node that the forward graph returns). `layout` is that of a
    view of an input: sizes, strides, and where it begins in the input.
    """

    node: torch.fx.Node
    kind: str
    base: torch.fx.Node | None
    requires_grad: bool
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph and what its placeholders and outputs mean.

    `constants` is the module whose attributes the graph reads. `inputs` maps each primal
    placeholder to `("parameter", name)`, `("buffer", name)` or `("input", index)`. `tangents` maps
    each tangent placeholder to the forward graph output whose gradient it is. `mutations` pairs a
    placeholder with the node of its new data. `gradients` maps placeholders to the node of their
    gradient. `leaves` are the inputs that keep their gradient in `.grad`, besides all parameters.
    `device` is where its tensors are taken to be, if they were traced elsewhere.
    `changed` are inputs that autograd would see changed, which none but leaves may be.
    """

    graph: torch.fx.Graph
    constants: torch.nn.Module
    inputs: dict[torch.fx.Node, tuple[str, str | int]]
    tangents: dict[torch.fx.Node, torch.fx.Node]
    outputs: tuple[OutputRole, ...]
    mutations: tuple[tuple[torch.fx.Node, torch.fx.Node], ...]
    gradients: dict[torch.fx.Node, torch.fx.Node]
    leaves: frozenset[tuple[str, str | int]] = frozenset()
    device: torch.device | None = None
    changed: frozenset[tuple[str, str | int]] = frozenset()


def is_traced_tensor(item: object) -> bool:
    """Whether a tensor exists only while tracing."""
    return isinstance(item, (FakeTensor, FunctionalTensor)) or (
        isinstance(item, torch.Tensor) and torch._is_functional_tensor(item)
    )


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the meta device, or was made under a `FakeTensorMode`."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


class StandIns:
    """Fake tensors that are traced in place of those that hold no data.

    One on meta is traced as one on the CPU: on meta torch takes other operators apart, and loses
    gradients. Of a tensor only shape, strides, type and device are taken over.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the stand-in of a tensor; one that holds data stands for itself."""
        known = self._made.get(id(tensor))
        if known is not None:
            return known[1]
        if not has_no_data(tensor) or is_traceable_wrapper_subclass(tensor):
            return tensor
        made = self._make(tensor)
        self._made[id(tensor)] = (tensor, made)
        self._made[id(made)] = (made, made)
        return made

    def without_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the stand-in of a tensor, of one that holds data, too."""
        stand_in = self.of(tensor)
        return stand_in if has_no_data(stand_in) else self._mode.from_tensor(stand_in)

    @contextlib.contextmanager
    def in_place_of_new(self) -> Iterator[None]:
        """Let new tensors hold no data."""
        with self._mode:
            yield

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        made = new_fake(self._mode, tensor.shape, tensor.stride(), tensor.dtype, device)
        return made.requires_grad_(tensor.requires_grad)


def new_fake(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    storage: torch.UntypedStorage | None = None,
    offset: int = 0,
) -> FakeTensor:
    """Make a fake tensor, in that storage if one is given, without running an operator."""
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if storage is not None:
            made.set_(storage, offset, shape, stride)
    return FakeTensor(mode, made, device)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Leave the user's `FakeTensorMode`, and a default device of meta."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device("cpu"))
        yield


def autocast_as_traced() -> contextlib.AbstractContextManager[None]:
    """Cast a parameter anew at each use under autocast, as while tracing."""
    return cast("contextlib.AbstractContextManager[None]", disable_autocast_cache())


def is_custom_backward(maker: type) -> bool:
    """Whether a node of this type is the backward of an `autograd.Function` of Python."""
    return issubclass(maker, BackwardCFunction)


def saves_through_hooks() -> bool:
    """Whether what is saved for a backward passes through hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def failures_untold() -> Iterator[None]:
    """Keep torch from logging an operator that refuses fake tensors, which raises besides."""
    told = logging.getLogger(FakeTensorMode.__module__)
    before, told.disabled = told.disabled, True
    try:
        yield
    finally:
        told.disabled = before


def fake_constant(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """Make the fake tensor of a constant, whose number is known as it was while tracing."""
    fake = mode.from_tensor(tensor)
    if tensor.numel() == 1:
        fake.constant = tensor
    return fake


def fake_mode_of(graph: torch.fx.Graph) -> FakeTensorMode:
    """Find the fake mode in which a joint graph was traced."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise CaptureError("the captured graph has no tensor at all")


def trace_joint(
    module: torch.nn.Module,
    tensors: list[torch.Tensor],
    within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Joint:
    """Trace the joint graph of `module(*tensors)`, which returns a list of tensors.

    `within` is entered for each attempt, in the state in which the module is then traced.

    Raises:
        CaptureError: naming the user's line if control flow depends on data, or saying what else
            keeps the module from being one static graph.
    """
    try:
        with compile_lock:
            return _trace(module, tensors, within, exporting=False)
    except _DATA_DEPENDENT as error:  # models that ask torch whether it exports may avoid it
        first = depends_on_data(error)
    try:
        with compile_lock:
            return _trace(module, tensors, within, exporting=True)
    except _DATA_DEPENDENT as error:
        raise CaptureError(depends_on_data(error)) from error
    except CaptureError as error:
        raise CaptureError(f"{first}. Traced as by torch.export, {error}") from error


def let_other_threads_compile() -> None:
    """Take back, within a trace, a flag by which code that is compiled refuses to run.

    It is of the process: another thread would be refused. Nothing that is traced looks at it.
    """
    _symbolic_trace._is_fx_tracing_flag = False


def try_start(module: torch.nn.Module, tensors: list[torch.Tensor]) -> None:
    """Trace a module that raises `CaptureError` where no more is to be traced.

    Within an attempt of `trace_joint`. What it raises beside that ends the attempt, as it would
    when the module is traced.
    """
    if torch.compiler.is_exporting():
        return  # no attempt follows
    with contextlib.ExitStack() as stack, contextlib.suppress(CaptureError):
        _exported(stack, module, tensors)


def _trace(
    module: torch.nn.Module,
    tensors: list[torch.Tensor],
    within: Callable[[], contextlib.AbstractContextManager[None]],
    *,
    exporting: bool,
) -> Joint:
    joint = _traced(module, tensors, within, exporting=exporting)
    if may_draw_in_order_of_dimensions(joint.graph):
        mode = DrawnAnew()  # type: ignore[no-untyped-call]
        joint = _traced(module, tensors, within, mode, exporting=exporting)
    return joint


def _traced(
    module: torch.nn.Module,
    tensors: list[torch.Tensor],
    within: Callable[[], contextlib.AbstractContextManager[None]],
    mode: contextlib.AbstractContextManager[Any] | None = None,
    *,
    exporting: bool,
) -> Joint:
    with contextlib.ExitStack() as stack:
        if exporting:
            stack.enter_context(_compiling_state_context())
        stack.enter_context(within())
        stack.enter_context(mode or contextlib.nullcontext())
        joint = _exported(stack, module, tensors)
        metadata = joint._aot_state.fw_metadata
        return _read_roles(joint.graph_module, metadata)


def _exported(
    stack: contextlib.ExitStack, module: torch.nn.Module, tensors: list[torch.Tensor]
) -> Any:
    try:
        return aot_export_joint_with_descriptors(stack, module, tuple(tensors))
    except (CaptureError, *_DATA_DEPENDENT):
        raise
    except Exception as error:
        cause = _data_dependent_cause(error)
        if cause is not None:
            raise cause from error
        raise not_traced(error) from error


def _data_dependent_cause(error: BaseException) -> Exception | None:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, _DATA_DEPENDENT):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _read_roles(module: torch.fx.GraphModule, metadata: Any) -> Joint:
    inputs: dict[torch.fx.Node, tuple[str, str | int]] = {}
    tangent_of: dict[torch.fx.Node, Any] = {}
    by_role: dict[Any, torch.fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        role = node.meta["desc"]
        by_role[role] = node
        if isinstance(role, roles.ParamAOTInput):
            inputs[node] = ("parameter", role.target)
        elif isinstance(role, roles.BufferAOTInput):
            inputs[node] = ("buffer", role.target)
        elif isinstance(role, roles.PlainAOTInput):
            inputs[node] = ("input", role.idx)
        elif isinstance(role, roles.TangentAOTInput):
            tangent_of[node] = role.output
        elif isinstance(role, roles.ForwardTokenAOTInput):
            raise has_effects(module.graph)
        else:
            raise CaptureError(
                f"an input of the graph has the role {type(role).__name__}, which is not "
                f"supported: tensor subclasses, and inputs that are overlapping views of one "
                f"another and are changed in place, cannot be captured"
            )
    placeholders = list(inputs)
    returned: dict[Any, torch.fx.Node] = {}
    mutations: list[tuple[torch.fx.Node, torch.fx.Node]] = []
    gradients: dict[torch.fx.Node, torch.fx.Node] = {}
    (values,) = cast("tuple[list[torch.fx.Node | None]]", module.graph.output_node().args)
    for value, role in zip(values, module.graph.output_node().meta["desc"], strict=True):
        if value is None:  # an input without a gradient
            continue
        if value.meta["val"].layout != torch.strided:
            raise CaptureError(
                f"{value.name} is a sparse tensor, which cannot be planned; "
                f"make embeddings with sparse=False"
            )
        returned[role] = value
        if isinstance(role, roles.InputMutationAOTOutput):
            mutations.append((by_role[role.mutated_input], value))
        elif isinstance(role, roles.GradAOTOutput):
            gradients[by_role[role.grad_of]] = value
        elif not isinstance(role, (roles.PlainAOTOutput, roles.IntermediateBaseAOTOutput)):
            raise CaptureError(
                f"an output of the graph has the role {type(role).__name__}, which is not "
                f"supported: changes of an input's shape or strides in place cannot be captured"
            )
    changed = set()
    for node, info in zip(placeholders, metadata.input_info, strict=True):
        hidden = info.mutations_under_no_grad_or_inference_mode
        if info.mutates_data and not (hidden or info.mutations_hidden_from_autograd):
            changed.add(inputs[node])
        if info.mutates_metadata:
            raise CaptureError(
                f"{' '.join(map(str, inputs[node]))} is changed in place and gets another shape; "
                f"clone it first"
            )
        if info.mutates_data and _overlaps_itself(node.meta["val"]):
            raise CaptureError(
                f"{' '.join(map(str, inputs[node]))} is changed in place, and several of its "
                f"elements share memory, as those of an expanded tensor do; clone it first"
            )
    return Joint(
        module.graph,
        module,
        inputs,
        {node: returned[output] for node, output in tangent_of.items()},
        tuple(_read_outputs(metadata, placeholders, returned)),
        tuple(mutations),
        gradients,
        changed=frozenset(changed),
    )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _read_outputs(
    metadata: Any, placeholders: list[torch.fx.Node], returned: dict[Any, torch.fx.Node]
) -> Iterator[OutputRole]:
    plain = [node for role, node in returned.items() if isinstance(role, roles.PlainAOTOutput)]
    bases = [
        node for role, node in returned.items() if isinstance(role, roles.IntermediateBaseAOTOutput)
    ]
    for node, info in zip(plain, metadata.output_info, strict=True):
        kind: str = "fresh"
        base: torch.fx.Node | None = None
        layout: Layout | None = None
        match info.output_type:
            case OutputType.is_input:
                kind, base = "input", placeholders[info.base_idx]
            case OutputType.alias_of_input:
                kind, base = "input_view", placeholders[info.base_idx]
                layout = _layout_in(base, info.view_meta_sequence)
            case OutputType.alias_of_intermediate | OutputType.alias_of_intermediate_save_as_output:
                kind, base = "view", bases[info.base_idx]
            case OutputType.alias_of_intermediate_base_is_user_output:
                kind, base = "view", plain[info.base_idx]
        yield OutputRole(node, kind, base, info.requires_grad, layout)


def _layout_in(base: torch.fx.Node, views: Any) -> Layout | None:
    """Find how a view lies in an input; where that is changed in place, its node does not say."""
    if views is None:
        return None
    given = base.meta["val"]
    view = torch._C._functionalization.apply_view_meta_sequence(given, views.sequence)
    if view.dtype != given.dtype:
        return None
    return tuple(view.shape), view.stride(), view.storage_offset() - given.storage_offset()
