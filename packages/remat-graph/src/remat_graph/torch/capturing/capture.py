"""Capture: from a module and one example call to a training graph, and its program.

The joint graph of AOTAutograd is functional, holds forward and backward, and names the role of each
input and output. It is rewritten (`passes`), read into a `Program`, and costed into a `Graph`.
A loss computed outside the module stands between the halves as the op `loss`, which turns what the
module returns into the gradients of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from remat_graph.errors import RematError
from remat_graph.torch.capturing.captures import Capture, Costs, finish
from remat_graph.torch.capturing.checks import (
    check_changed,
    check_devices,
    check_differentiable,
    check_measurable,
    check_shapes,
    is_dry,
    is_on_cuda,
)
from remat_graph.torch.capturing.trace import FlatRegion, Traced, trace, trace_region
from remat_graph.torch.cost.costs import Cost, DeviceSpec
from remat_graph.torch.cost.strides import RealStrides
from remat_graph.torch.errors import CaptureError, NoBackward
from remat_graph.torch.process import collector_at_rest
from remat_graph.torch.repeats.blocks import Repeat
from remat_graph.torch.repeats.periods import Irregular
from remat_graph.torch.rewrites.passes import EACH, ONCE, PassRun, Setting, check_passes, run_passes
from remat_graph.torch.tracing.failures import not_traced
from remat_graph.torch.tracing.fakes import StandIns, has_no_data, own_modes, without_modes
from remat_graph.torch.tracing.joint import Joint, Key, returned_nodes
from remat_graph.torch.tracing.structure import FlatCall, Structure, read_call, tensors_of_call

__all__ = [
    "capture",
    "capture_joint",
    "capture_region",
    "errors_told",
    "leaves_of",
    "passes_of",
    "tensor_at",
]

logger = logging.getLogger(__name__)


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    costs: Costs = "measure",
    measured: dict[str, Cost] | None = None,
    lstms_in_steps: bool = False,
) -> Capture:
    """Capture one forward and backward pass of a module as a graph.

    Tensors of the module and the call may be on the meta device or fake if costs are estimated;
    those on meta are captured as fake ones on the CPU, and real ones on the CPU may stand beside
    them. For a `DeviceSpec` with a `capability` all are captured as on such a device. Where the
    output has a scalar called `loss`, it alone is taken to be differentiated; other variants come
    from `Capture.variant`. The module's buffers, gradients and the global random generators are
    left as they were. `measured` are costs measured before, by equivalence class, and are added to.
    With `lstms_in_steps`, no LSTM is traced as the layers that eager runs: what that keeps is less.

    Raises:
        CaptureError: if no parameter or input requires a gradient, or nothing that is returned, or
            a scalar called `loss`, depends on one that does; inputs and module are on different
            devices, a lazy module was never called, the forward is no static graph (the message
            names the line), or an operator cannot be measured, as none can without data.
    """
    step = _ModuleCall.of(module, args, kwargs, costs)
    dry = step.capability is not None or is_dry(module, step.call)

    def captured(*, whole: bool) -> Capture:
        traced, missing = step.traced(whole=whole, lstms_in_steps=lstms_in_steps)
        with own_modes():
            return finish(
                traced.joint, missing, costs, {} if measured is None else measured,
                traced.structure, step.real, dry, traced.repeats,
            )  # fmt: skip

    with _collector(costs):
        return _traced_in_part(captured)


def passes_of(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    costs: Costs = "measure",
) -> tuple[PassRun, ...]:
    """Give what each pass between tracing and lowering does to the program of a call: print them.

    All arguments are as for `capture`, whose program this is, with every block traced. Nothing is
    measured but the layouts that operators give.

    Raises:
        CaptureError: as `capture` does.
    """
    runs: list[PassRun] = []
    step = _ModuleCall.of(module, args, kwargs, costs)
    with errors_told(), _collector(costs):
        traced, missing = step.traced(whole=True, watch=runs.append)
        with own_modes():
            run_passes(
                EACH, traced.joint, Setting(missing=missing, real=step.real), watch=runs.append
            )
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class _ModuleCall:
    """A call of a module that can be traced.

    `real` is for layouts that differ from those of fake tensors, if anything may be run;
    `capability` that of the CUDA device to trace for on the host.
    """

    module: torch.nn.Module
    call: FlatCall
    real: RealStrides | None
    capability: tuple[int, int] | None

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        costs: Costs,
    ) -> _ModuleCall:
        """Check that a call can be traced, and costed so.

        Raises:
            CaptureError: if not.
        """
        if costs not in ("measure", "estimate") and not isinstance(costs, DeviceSpec):
            raise CaptureError(f"costs={costs!r}; give 'measure', 'estimate' or a DeviceSpec")
        check_passes()
        call = read_call(args, dict(kwargs or {}))
        check_shapes(module)
        check_differentiable(module, call)
        check_devices(module, call)
        if costs == "measure":
            check_measurable(module, call)
        capability = None
        if isinstance(costs, DeviceSpec) and not is_on_cuda(module, call):
            capability = costs.capability
        return cls(module, call, RealStrides() if costs == "measure" else None, capability)

    def traced(
        self,
        *,
        whole: bool,
        watch: Callable[[PassRun], None] | None = None,
        lstms_in_steps: bool = False,
    ) -> tuple[Traced, frozenset[int]]:
        """Trace it, and find which gradients do not come: only that of the loss does, if any is.

        Raises:
            CaptureError: if it is no static graph, or there is no backward pass.
        """
        with without_modes(), torch.enable_grad():
            traced = trace(
                self.module, self.call, whole=whole, capability=self.capability,
                lstms_in_steps=lstms_in_steps,
            )  # fmt: skip
            check_changed(traced.joint, self.call.tensors, leaves_of(self.call.tensors))
            setting = Setting(
                {key: tensor_at(self.module, self.call.tensors, *key)
                 for key in traced.joint.inputs.values()},
                to_cuda=self.capability is not None,
            )  # fmt: skip
            joint = run_passes(ONCE, traced.joint, setting, watch=watch)
        if not joint.gradients:
            raise CaptureError(
                "nothing that the forward returns depends on a tensor that requires a gradient; "
                "there is no backward pass to plan"
            )
        return replace(traced, joint=joint), _all_but_loss(joint, traced.structure)


def capture_region(
    region: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    costs: Costs = "measure",
    loss_alone: bool = True,
    real: RealStrides | None = None,
    lstms_in_steps: bool = False,
) -> Capture:
    """Capture a function of a flat list of inputs, all of whose tensors are among them.

    Such are the graphs that TorchDynamo makes: parameters and buffers are inputs like any other.
    Inputs that are no tensors are taken to be the same at each call. The function returns a
    sequence, of tensors or `None`. With `loss_alone` and differentiable scalars among the outputs,
    those are taken to be losses, and the gradients of the others to be missing. `real` is what is
    known of layouts that differ from those of fake tensors, and is added to; without it nothing is
    run. `lstms_in_steps` is as for `capture`.

    Raises:
        CaptureError: if it is no static graph, nothing it returns depends on a tensor that
            requires a gradient, or an operator cannot be measured.
    """
    check_passes()
    tensors, _ = tensors_of_call(inputs)
    leaves, dry = leaves_of(tensors), any(map(has_no_data, tensors))

    def traced(inputs: Sequence[Any], stand_ins: list[torch.Tensor], *, whole: bool) -> Capture:
        flat = FlatRegion(region, inputs, stand_ins, whole=whole, lstms_in_steps=lstms_in_steps)
        with torch.enable_grad():
            joint = trace_region(flat, stand_ins)
        return capture_joint(
            replace(joint, leaves=leaves), stand_ins, flat.output_structure,
            costs=costs, loss_alone=loss_alone, real=real, dry=dry, repeats=flat.repeats,
        )  # fmt: skip

    def captured(*, whole: bool) -> Capture:
        short = traced(inputs, tensors, whole=whole)
        if not short._repeats:
            return short
        if short.missing:
            short.variant(frozenset())  # a backward may need it, and has no time to trace
        stand_ins = StandIns()
        fakes = {id(tensor): stand_ins.without_data(tensor) for tensor in tensors}
        without_data = [fakes.get(id(item), item) for item in inputs]
        trace_whole = partial(traced, without_data, list(fakes.values()), whole=True)
        return replace(short, _trace_whole=trace_whole)

    with _collector(costs):
        return _traced_in_part(captured)


def capture_joint(
    joint: Joint,
    tensors: list[torch.Tensor],
    structure: Structure,
    *,
    costs: Costs,
    loss_alone: bool,
    real: RealStrides | None,
    dry: bool,
    repeats: tuple[Repeat, ...] = (),
) -> Capture:
    """Make the capture of a region that was traced, for a call with distinct tensors like these.

    `structure` is that of what it returns; `dry` says that the tensors of the call hold no data.
    The rest is as for `capture_region`, which says what is raised.
    """
    check_changed(joint, tensors, joint.leaves)
    setting = Setting({key: tensors[int(key[1])] for key in joint.inputs.values()})
    joint = run_passes(ONCE, joint, setting)
    if not joint.gradients:
        raise NoBackward(
            "nothing that the region returns depends on a tensor that requires a gradient; "
            "there is no backward pass to plan"
        )
    missing = _all_but_scalars(joint) if loss_alone else frozenset()
    with own_modes():
        return finish(joint, missing, costs, {}, structure, real, dry, repeats)


def leaves_of(tensors: Sequence[torch.Tensor]) -> frozenset[Key]:
    """Name those of the distinct inputs of a region that keep their gradient in `.grad`."""
    return frozenset(("input", index) for index, each in enumerate(tensors) if each.is_leaf)


def _collector(costs: Costs) -> AbstractContextManager[None]:
    return nullcontext() if costs == "measure" else collector_at_rest()


def _traced_in_part(captured: Callable[..., Capture]) -> Capture:
    """Capture with few of the blocks that do the same, or all where that does not say the rest.

    Raises:
        CaptureError: also for what torch raises, with the user's line; not if there is no memory.
    """
    with errors_told():
        try:
            return captured(whole=False)
        except Irregular as error:
            logger.info("every block is traced: %s", error)
            return captured(whole=True)


@contextmanager
def errors_told() -> Iterator[None]:
    """Raise what torch raises as a `CaptureError` with the user's line; not if memory is short."""
    try:
        yield
    except (RematError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise not_traced(error) from error


def tensor_at(
    module: torch.nn.Module, tensors: list[torch.Tensor], kind: str, key: str | int
) -> torch.Tensor:
    """Find the live tensor that an input of a program stands for."""
    if kind == "input":
        return tensors[int(key)]
    *path, name = str(key).split(".")
    owner: Any = module
    for part in path:  # many times a step: torch's get_submodule takes ten times as long
        owner = owner._modules[part]
    tensor = owner._parameters.get(name)
    if tensor is None:
        tensor = getattr(owner, name)
    if not isinstance(tensor, torch.Tensor):
        raise CaptureError(f"{kind} {key!r} of the module is no tensor any more")
    return tensor


def _all_but_loss(joint: Joint, structure: Structure) -> frozenset[int]:
    """Find the differentiable outputs that are not the loss, if the output says which one is.

    Raises:
        CaptureError: if it needs no gradient.
    """
    returned = returned_nodes(joint)
    names = [path.lstrip(".[").strip("'\"]") for path in structure.paths()]
    for name, output in zip(names, joint.outputs, strict=True):
        if name == "loss" and output.node.meta["val"].ndim == 0:
            if not output.requires_grad:
                raise CaptureError(
                    "the loss that the forward returns depends on no tensor that requires a "
                    "gradient; take a detach() or no_grad() out of it, or return no loss, to plan "
                    "for one that is computed from the other outputs"
                )
            loss = output.node if output.base is None else output.base
            return frozenset(
                returned.index(node) for node in joint.tangents.values() if node is not loss
            )
    return frozenset()


def _all_but_scalars(joint: Joint) -> frozenset[int]:
    """Find the differentiable outputs beside those that are scalars, if any are."""
    returned = returned_nodes(joint)
    differentiable = set(joint.tangents.values())
    scalars = {node for node in differentiable if node.meta["val"].ndim == 0}
    return frozenset(returned.index(node) for node in differentiable - scalars if scalars)
