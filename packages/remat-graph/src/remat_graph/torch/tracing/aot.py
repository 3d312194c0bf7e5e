"""The one door to AOTAutograd; private names of torch are here, in `roles` and in `fakes` alone.

`trace_joint` gives the joint forward and backward graph of a function of a module, functionalised,
with the role of each input and output. Tried with torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._export.utils import _compiling_state_context
from torch._functorch import config
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.autograd.function import BackwardCFunction
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import disable_autocast_cache
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from remat_graph.torch.errors import CaptureError
from remat_graph.torch.tracing.checks_of_matrices import raise_within_operators
from remat_graph.torch.tracing.dependence import dependences
from remat_graph.torch.tracing.draws import (
    DrawnAnew,
    dropouts_of_all,
    may_draw_in_order_of_dimensions,
)
from remat_graph.torch.tracing.failures import depends_on_data, not_traced
from remat_graph.torch.tracing.fakes import fake_mode_of, forget_originals
from remat_graph.torch.tracing.joint import Joint
from remat_graph.torch.tracing.layouts import lying_as_real
from remat_graph.torch.tracing.masked_writes import masked_writes_of_known_size
from remat_graph.torch.tracing.roles import read_roles
from remat_graph.torch.tracing.whole_operators import operators_kept_whole

__all__ = [
    "autocast_as_traced",
    "is_custom_backward",
    "let_other_threads_compile",
    "saves_through_hooks",
    "trace_joint",
    "try_start",
]

_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


def autocast_as_traced() -> contextlib.AbstractContextManager[None]:
    """Cast a parameter anew at each use under autocast, as while tracing."""
    return cast("contextlib.AbstractContextManager[None]", disable_autocast_cache())


def is_custom_backward(maker: type) -> bool:
    """Whether a node of this type is the backward of an `autograd.Function` of Python."""
    return issubclass(maker, BackwardCFunction)


def saves_through_hooks() -> bool:
    """Whether what is saved for a backward passes through hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


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
    computed_from: list[tuple[int, ...]] = []

    def note(_: Any, __: Any, outputs: list[torch.Tensor]) -> None:
        computed_from[:] = dependences(outputs)

    with contextlib.ExitStack() as stack:
        if exporting:
            stack.enter_context(_compiling_state_context())
        stack.enter_context(module.register_forward_hook(note))
        stack.enter_context(within())
        stack.enter_context(lying_as_real())
        stack.enter_context(operators_kept_whole())
        stack.enter_context(masked_writes_of_known_size())
        stack.enter_context(dropouts_of_all())
        stack.enter_context(mode or contextlib.nullcontext())
        joint = _exported(stack, module, tensors)
        raise_within_operators(joint.graph_module.graph)
        metadata = joint._aot_state.fw_metadata
        roles = read_roles(joint.graph_module, metadata, computed_from)
        forget_originals(fake_mode_of(roles.graph))
        return roles


def _exported(
    stack: contextlib.ExitStack, module: torch.nn.Module, tensors: list[torch.Tensor]
) -> Any:
    # Autograd runs a backward in the autocast of who calls it, and that is seldom the forward's
    stack.enter_context(config.patch(backward_pass_autocast="off"))
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
