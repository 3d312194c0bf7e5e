"""What each operation costs: measured on the device once per equivalence class, or estimated.

Measured: inputs of the right shape, stride and type are made up, the call is warmed up and the
least of its times is taken, which other work on the machine disturbs least; workspace is what the
allocator held at most during the call beyond what the call keeps. A call that takes long runs
twice; of one that runs in slices two are run, and the second stands for those that are not. Nothing
of the model, and no generator, is touched. Estimated, without running anything: the roofline
max(flops / rate, bytes / bandwidth) plus a launch time for a `DeviceSpec`. Both count what a call
returns but nothing reads as workspace.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from remat_graph.errors import RematError
from remat_graph.graph import Graph
from remat_graph.torch.calls import is_view
from remat_graph.torch.cost.memory import AllocationRecorder
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.fusing.compiling import compile_kernels
from remat_graph.torch.fusing.kernel import run_fused, run_over
from remat_graph.torch.fusing.program import kernels_of
from remat_graph.torch.kernels.unit_tangent import scaled
from remat_graph.torch.operators import operator_of
from remat_graph.torch.process import generators_restored, process_lock
from remat_graph.torch.program import Call, LossCost, Program, TensorFacts, Variable
from remat_graph.torch.recomputing import is_collective
from remat_graph.torch.ways.slice_by_slice import SlicedBody
from remat_graph.torch.ways.slicing import run_in_slices

__all__ = [
    "Cost",
    "Costs",
    "DeviceSpec",
    "costed_graph",
    "costs_of",
    "estimate_costs",
    "measure_costs",
    "with_runs_again",
]

logger = logging.getLogger(__name__)

aten = torch.ops.aten

_CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
_REPEATS = 7
_ENOUGH_SECONDS, _LONG_SECONDS = 0.05, 0.02
_DRAWN = 1 << 18  # elements of an input that are drawn; the others repeat them
_SAMPLE = 2  # slices that are run of a call


@dataclass(frozen=True, slots=True)
class Cost:
    """Time in seconds and workspace in bytes of one call."""

    time: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The speed of a device: operations and bytes per second, and seconds to launch a kernel.

    `flops_per_second` is for 32-bit floats; `half_flops_per_second` for 16-bit ones;
    `convolution_flops_per_second` for convolutions of 32-bit floats, if they run at another rate
    than products do, as in TF32. `memory_bytes` is what the device has, of which the budget
    `"auto"` of a plan for it is a share. `capability` is the compute capability of a CUDA device,
    as `torch.cuda.get_device_capability` says it: what is captured elsewhere has then the
    operators, and the blocks of memory, of such a device, and can be read but not run.

    Raises:
        CaptureError: if a rate, or the memory, is not positive.
    """

    name: str
    flops_per_second: float
    half_flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    convolution_flops_per_second: float | None = None

    def __post_init__(self) -> None:
        for figure in (
            "flops_per_second", "half_flops_per_second", "bytes_per_second", "memory_bytes",
            "convolution_flops_per_second",
        ):  # fmt: skip
            rate = getattr(self, figure)
            if rate is not None and rate <= 0:
                raise CaptureError(f"DeviceSpec {self.name!r} has {figure}={rate}")

    @classmethod
    def of(cls, device: torch.device) -> DeviceSpec:
        """Give round figures for a kind of device; ratios between operations are what counts."""
        if device.type == "cuda":
            return cls("a recent CUDA GPU", 2e13, 2e14, 1.5e12, 4e-6)
        return cls("a few CPU cores", 1e11, 5e10, 2e10, 3e-6)


Costs = Literal["measure", "estimate"] | DeviceSpec


def costed_graph(
    program: Program, costs: Costs, measured: dict[str, Cost], loss: LossCost
) -> Graph:
    """Make the graph of a program, with what each call costs; `measured` is added to.

    Raises:
        CaptureError: if a call cannot be measured.
    """
    by_op = costs_of(program, costs, measured)
    return program.graph(
        {name: cost.time for name, cost in by_op.items()},
        {name: cost.workspace_bytes for name, cost in by_op.items()},
        loss,
    )


def costs_of(program: Program, costs: Costs, measured: dict[str, Cost]) -> dict[str, Cost]:
    """Measure or estimate every call of a program, as asked; keys are op names.

    Raises:
        CaptureError: if a call cannot be measured.
    """
    if costs == "measure":
        by_op = measure_costs(program, measured)
    else:
        spec = costs if isinstance(costs, DeviceSpec) else DeviceSpec.of(program.device)
        by_op = estimate_costs(program, spec)
    with_runs_again(program, by_op)
    return by_op


def with_runs_again(program: Program, costs: dict[str, Cost]) -> None:
    """Let what scales a gradient take what its twin does, which it may have to run again.

    In one slice, what the twin gives may come to be after the most that it takes.
    """
    for op, call in program.calls.items():
        if call.target is scaled:
            twin = program.twins[op]
            given = filter(None, program.calls[twin].results if call.args[3] == 1 else ())
            again = costs[twin].workspace_bytes
            again += sum(program.facts[name].storage_bytes for name in given)
            costs[op] = replace(costs[op], workspace_bytes=again)


def estimate_costs(program: Program, spec: DeviceSpec) -> dict[str, Cost]:
    """Estimate every call of a program on a device; keys are op names."""
    return _by_class(program, lambda call: _estimate(program, call, spec))


def measure_costs(program: Program, measured: dict[str, Cost] | None = None) -> dict[str, Cost]:
    """Measure every call of a program on the devices of its tensors; keys are op names.

    `measured` maps equivalence classes to costs measured before, and is added to. What the ranks of
    a group run together is estimated: others would wait for it, or take part in it. So is what does
    not run on made-up inputs, as one whose counts must add up to a size.

    Raises:
        CaptureError: if there is no memory for a call, naming it.
    """
    with process_lock, generators_restored(), torch.no_grad():
        if not compile_kernels(kernels_of(program).values()):
            measured = dict(measured or {})  # what takes other kernels' place is not remembered
        return _by_class(program, lambda call: _measure_or_estimate(program, call), measured)


def _by_class(
    program: Program, cost: Callable[[Call], Cost], measured: dict[str, Cost] | None = None
) -> dict[str, Cost]:
    classes = {} if measured is None else measured
    costs = {}
    for name, call in program.calls.items():
        equivalence = program.equivalence[name]
        if equivalence not in classes:
            try:
                classes[equivalence] = cost(call)
            except CaptureError:
                raise
            except Exception as error:
                raise CaptureError(
                    f"cannot find the cost of {name} ({call.target}): {error}; "
                    f"costs='estimate' plans without running operators"
                ) from error
        costs[name] = classes[equivalence]
    return costs


def _made_up(facts: TensorFacts) -> torch.Tensor:
    """Make a tensor of the right kind: integers 0 (a legal index), floats in [0.25, 1)."""
    itemsize = facts.dtype.itemsize
    extent = (
        facts.offset
        + 1
        + sum((size - 1) * stride for size, stride in zip(facts.shape, facts.stride, strict=True))
    )
    count = max(extent if 0 not in facts.shape else 0, facts.storage_bytes // itemsize)
    base = torch.zeros(count, dtype=facts.dtype, device=facts.device)
    if facts.dtype.is_floating_point or facts.dtype.is_complex:
        drawn = base[:_DRAWN]
        drawn.real.uniform_(0.25, 1.0) if facts.dtype.is_complex else drawn.uniform_(0.25, 1.0)
        for start in range(_DRAWN, count, _DRAWN):
            part = base[start : start + _DRAWN]
            part.copy_(drawn[: len(part)])
    return base.as_strided(facts.shape, facts.stride, facts.offset)


def _with_tensors(
    facts: Mapping[str, TensorFacts],
    constants: Mapping[str, Any],
    call: Call,
    make: Callable[[TensorFacts], Any],
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    tensors: dict[str, Any] = {}

    def fill(item: Any) -> Any:
        if not isinstance(item, Variable):
            return item
        if item.name not in facts:
            return constants[item.name]
        if item.name not in tensors:
            tensors[item.name] = make(facts[item.name])
        return tensors[item.name]

    args, kwargs = pytree.tree_map(
        fill, (call.args, dict(call.kwargs)), is_leaf=lambda item: isinstance(item, Variable)
    )
    return args, kwargs


def _measure_or_estimate(program: Program, call: Call) -> Cost:
    device = _device(program, call)
    if not is_collective(call.target, call.body):
        try:
            return _measure(program, call, device)
        except (RematError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            logger.info("%s is estimated, it fails on made-up inputs: %s", call.target, error)
    return _estimate(program, call, DeviceSpec.of(device))


def _measure(program: Program, call: Call, device: torch.device) -> Cost:
    args, kwargs = _with_tensors(program.facts, program.constants, call, _made_up)
    made_up = operator_of(call.target).made_up
    args = args if made_up is None else made_up(*args)
    share = _share_run(call)
    long_seconds, enough_seconds = _LONG_SECONDS / share, _ENOUGH_SECONDS / share
    first, _ = _time_once(device, call, args, kwargs)
    workspace, times = 0, list[float]()
    if device.type == program.device.type:
        with AllocationRecorder(device) as recorder:
            seconds, kept = _time_once(device, call, args, kwargs)
        workspace = recorder.requested_bytes - _kept_bytes(call, kept, device)
        del kept
        times = [seconds] if seconds >= long_seconds else []  # of those, recording is a small part
    times += [first] if first >= long_seconds else []  # and so is warming up
    while len(times) < _REPEATS and (len(times) < 2 or sum(times) < enough_seconds):
        times.append(_time_once(device, call, args, kwargs)[0])
    return Cost(min(times), max(0, workspace))


def _time_once(
    device: torch.device, call: Call, args: Any, kwargs: Mapping[str, Any]
) -> tuple[float, Any]:
    """Run a call once, or two slices of it; say how long it takes, and give what it makes."""
    clock = _Clock(device)
    with torch.cuda.device(device if device.type == "cuda" else -1):  # -1: as it is
        clock.mark()
        if call.target is not run_in_slices:
            run = run_over if call.target is run_fused else operator_of(call.target).runs_as
            results = (run or call.target)(*args, **kwargs)
            clock.mark()
            return sum(clock.seconds()), results
        body, slices, *tensors = args
        bounds = _bounds_run(body, slices)
        results = body.run(tensors, bounds, clock.mark)
        clock.mark()
    seconds = clock.seconds()
    return sum(seconds) + seconds[-2] * (body.units - bounds[-1]) / bounds[1], results


def _bounds_run(body: SlicedBody, slices: int) -> list[int]:
    """Bound the slices that are run of so many: two of the longest; all, if there are no more."""
    bounds = body.bounds(slices)
    if slices <= _SAMPLE:
        return bounds
    longest = max(stop - start for start, stop in pairwise(bounds))
    return [min(longest * at, body.units) for at in range(_SAMPLE + 1)]


def _share_run(call: Call) -> float:
    """Give the share of a call that is run to measure it."""
    if call.target is not run_in_slices:
        return 1.0
    body, slices = call.args[:2]
    return float(_bounds_run(body, slices)[-1] / body.units)


class _Clock:
    """Notes moments on a device, and says what time is between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moments: list[Any] = []

    def mark(self) -> None:
        """Note a moment."""
        if self._device.type != "cuda":
            self._moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._moments.append(event)

    def seconds(self) -> list[float]:
        """Give the seconds from each moment to the next, once the device has come to the last."""
        pairs = pairwise(self._moments)
        if self._device.type != "cuda":
            return [end - begin for begin, end in pairs]
        self._moments[-1].synchronize()
        return [float(begin.elapsed_time(end)) / 1e3 for begin, end in pairs]


def _device(program: Program, call: Call) -> torch.device:
    names = (*call.reads, *(name for name in call.results if name is not None))
    devices = [program.facts[name].device for name in names if name in program.facts]
    accelerators = [device for device in devices if device.type != "cpu"]
    return (accelerators or devices or [torch.device("cpu")])[0]


def _kept_bytes(call: Call, returned: Any, device: torch.device) -> int:
    """Sum what a call keeps, but for what it makes in the buffers of its inputs."""
    parts = list(returned) if call.sequence else [returned]
    storages = {}
    over = set[str]() if call.body is None else {new for _, new in call.body.overwrites}
    names = call.results if call.body is None or not over else call.body.outputs
    for name, part in zip(names, parts, strict=True):
        if name in over:
            continue
        if name is not None and isinstance(part, torch.Tensor) and part.device.type == device.type:
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = int(storage.nbytes())
    return sum(storages.values())


def _estimate(program: Program, call: Call, spec: DeviceSpec) -> Cost:
    if call.target is scaled:  # almost always by a number
        call = Call(aten.mul.Tensor, call.args[:2], {}, call.results, sequence=False)
    if call.target is not run_in_slices:
        seconds = _seconds(call, program.facts, program.constants, spec)
        return Cost(seconds + spec.launch_seconds, call.workspace_bytes)
    body, slices = call.args[:2]
    calls = [each for each in body.body.calls if not is_view(each)]
    seconds = sum(_seconds(each, body.facts, {}, spec) for each in calls)
    return Cost(seconds + spec.launch_seconds * slices * len(calls), call.workspace_bytes)


def _seconds(
    call: Call, facts: Mapping[str, TensorFacts], constants: Mapping[str, Any], spec: DeviceSpec
) -> float:
    """Estimate what a call takes once it is launched."""
    results = [facts[name] for name in call.results if name is not None]
    reads = [facts[name] for name in call.reads if name in facts]
    moved = sum(_touched_bytes(each) for each in (*reads, *results))
    flops = 0.0
    operator = getattr(call.target, "overloadpacket", call.target)
    counter = flop_registry.get(operator_of(call.target).flops_like or operator)
    if counter is not None and results:
        args, kwargs = _with_tensors(facts, constants, call, _on_meta)
        with torch.no_grad():
            flops = float(counter(*args, **kwargs, out_val=call.target(*args, **kwargs)))
    half = bool(results) and results[0].dtype.itemsize <= 2
    rate = spec.half_flops_per_second if half else spec.flops_per_second
    if operator in _CONVOLUTIONS and not half:
        rate = spec.convolution_flops_per_second or rate
    return max(flops / rate, moved / spec.bytes_per_second)


def _on_meta(facts: TensorFacts) -> torch.Tensor:
    return torch.empty_strided(facts.shape, facts.stride, dtype=facts.dtype, device="meta")


def _touched_bytes(facts: TensorFacts) -> int:
    pairs = zip(facts.shape, facts.stride, strict=True)
    return math.prod(size for size, stride in pairs if stride) * facts.dtype.itemsize
