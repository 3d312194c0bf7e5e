"""Code for kernels by TorchInductor.

A kernel is traced on tensors without data, its operators taken apart as Inductor asks, and compiled
apart from the user's settings: what it patches it patches for this compilation alone. Its outputs
are asked for in the layouts that the operators have. Of a group of any size, sizes are symbols.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from remat_graph.torch.calls import TensorFacts
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.fusing.kernel import Kernel
from remat_graph.torch.fusing.missing import left_missing
from remat_graph.torch.fusing.sized_code import CodeOfSizes, Compiled, SizedCode
from remat_graph.torch.process import quietly
from remat_graph.torch.tracing.symbols import Conditions, expression_of, new_symbol

__all__ = ["compile_for_sizes", "compile_kernels", "missing_compiler"]

logger = logging.getLogger(__name__)


def compile_kernels(kernels: Iterable[Kernel]) -> bool:
    """Compile those that have not been; one that cannot be keeps the reason, and runs as it did.

    Gives whether all are: within `kernels_there_alone`, some may be left for later.
    """
    are_all = True
    for kernel in kernels:
        if kernel.is_settled or kernel.take_code_of_sizes():
            continue
        if left_missing(kernel):
            are_all = False
            continue
        if kernel.sized is not None and kernel.sized.may_have_more:
            compile_for_sizes(kernel.sized, kernel.symbols)
            if kernel.take_code_of_sizes():
                continue
        try:
            with quietly():  # Inductor warns of what its own modules use
                kernel.compiled = _compiled(kernel)
        except Exception as error:
            kernel.failure = f"{type(error).__name__}: {error}"
            logger.info("%s is not compiled: %s", kernel, kernel.failure)
    return are_all


def compile_for_sizes(sized: SizedCode, numbers: Sequence[Any]) -> None:
    """Compile a group for all sizes that are as these `numbers` of its symbols to the compiler.

    If it cannot be, it keeps the reason.
    """
    try:
        with quietly():
            sized.codes.append(_code_of_sizes(sized, numbers))
    except Exception as error:
        sized.failure = f"{type(error).__name__}: {error}"
        logger.info("a group of any size is not compiled: %s", sized.failure)


@functools.cache
def missing_compiler(device: torch.device) -> bool:
    """Whether there is nothing to compile kernels with for a device; told once."""
    with quietly():
        from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415 - takes a second
        from torch.utils._triton import has_triton  # noqa: PLC0415

    try:
        if device.type == "cuda":
            missing = not has_triton()
        else:
            get_cpp_compiler()
            missing = False
    except Exception:  # torch's own error of a compiler that is not there
        missing = True
    if missing:
        what = "Triton" if device.type == "cuda" else "C++ compiler"
        logger.warning("eager kernels run in place of compiled ones: there is no %s", what)
    return missing


def _compiled(kernel: Kernel) -> Compiled:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    return _code(kernel, kernel.facts, (), mode)


def _code_of_sizes(sized: SizedCode, numbers: Sequence[Any]) -> CodeOfSizes:
    env = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    symbols = [new_symbol(env, *each) for each in zip(sized.symbols, numbers, strict=True)]
    names = tuple(str(expression_of(symbol)) for symbol in symbols)  # of which some may be decided
    code = _code(sized, sized.facts_at(symbols), symbols, mode)
    if any(
        str(symbol) in names and number.is_number for symbol, number in env.replacements.items()
    ):
        raise CaptureError("the compiler decides its sizes")
    conditions = Conditions(env, names)
    return CodeOfSizes(code, lambda own: conditions.are_in_range(own) and conditions.hold(own))


def _code(
    source: Kernel | SizedCode,
    facts: Mapping[str, TensorFacts],
    symbols: Sequence[Any],
    mode: FakeTensorMode,
) -> Compiled:
    """Compile the body of a source for symbols, which its code takes before the tensors."""
    from torch._inductor import config  # noqa: PLC0415 - takes a second
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415

    body = source.body_at(symbols)
    device, overwritten = facts[body.outputs[0]].device, {old for old, _ in body.overwrites}
    with _apart(device), mode:
        inputs = [*symbols, *(_like(facts[name]) for name in body.inputs)]
        traced = _traced(source, facts, inputs, len(symbols))
    ends = [at for at, name in enumerate(body.inputs, len(symbols)) if name in overwritten]
    context = TracingContext(mode)
    context.fw_metadata = _Ends(ends)  # type: ignore[assignment]
    with _apart(device), config.patch(_SETTINGS), tracing(context), mode:
        code: Any = compile_fx_inner(traced, inputs, is_inference=False, is_backward=bool(ends))
    run: Compiled = getattr(code, "current_callable", None) or code
    return run


@dataclass(frozen=True, slots=True)
class _Ends:
    """What Inductor reads of a backward's metadata: which inputs' memory it may use."""

    bw_donated_idxs: list[int]
    static_input_indices: tuple[int, ...] = ()


_SETTINGS = {
    "reorder_for_peak_memory": False,
    "keep_output_stride": True,
    "triton.cudagraphs": False,
    "emulate_precision_casts": True,  # x - x.bfloat16().float() is not zero
    "size_asserts": True,  # inputs may lie otherwise than was traced
}


def _traced(
    source: Kernel | SizedCode, facts: Mapping[str, TensorFacts], inputs: Sequence[Any], count: int
) -> torch.fx.GraphModule:
    """Trace the body of a source; the first inputs, so many, are symbols."""
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

    def run(*items: Any) -> list[torch.Tensor]:
        body = source.body_at(items[:count])
        return Kernel(source.key, body, facts).interpreted(items[count:])

    graph = make_fx(run, decomposition_table=select_decomp_table())(*inputs)
    for at, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        node.name = node.target = f"k{source.key}_{at}"  # which inputs end is not in Inductor's key
    graph.recompile()
    (output,) = graph.graph.find_nodes(op="output")
    nodes = output.args[0]
    for node, name in zip(nodes, source.body_at(inputs[:count]).outputs, strict=True):
        node.meta["val"] = _like(facts[name])
    output.meta["user_visible_output_idxs"] = list(range(len(nodes)))
    return graph


def _like(facts: TensorFacts) -> torch.Tensor:
    return torch.empty_strided(facts.shape, facts.stride, dtype=facts.dtype, device=facts.device)


@contextlib.contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Leave out the autograd and the autocast that the caller is in."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
