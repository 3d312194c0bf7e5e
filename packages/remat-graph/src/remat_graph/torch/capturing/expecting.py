"""A traced step by the gradients of its outputs that come: its program, and what they lead to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from remat_graph.torch.cost.strides import RealStrides
from remat_graph.torch.lowering import build_program
from remat_graph.torch.program import Program
from remat_graph.torch.repeats.blocks import Repeat
from remat_graph.torch.repeats.unrolling import unroll
from remat_graph.torch.rewrites.passes import EACH, Setting, run_passes
from remat_graph.torch.tracing.joint import Joint, copy_joint

__all__ = ["differentiable_inputs", "program_expecting"]


def program_expecting(
    base: Joint,
    missing: frozenset[int],
    real: RealStrides | None,
    repeats: tuple[Repeat, ...],
    leave_out: frozenset[str],
) -> tuple[Program, bool]:
    """Make the program for all gradients but those at positions `missing`, without some passes.

    The second says whether what eager computes several times is computed once.

    Raises:
        CaptureError: if no gradient is left.
    """
    setting = Setting(missing=missing, real=real)
    joint = run_passes(EACH, copy_joint(base), setting, leave_out=leave_out)
    return unroll(build_program(joint), repeats), joint.merged


def differentiable_inputs(joint: Joint, repeats: Sequence[Repeat]) -> tuple[str, ...]:
    """Name the inputs of the program that get a gradient if every output does."""
    traced = {joint.inputs[node] for node in joint.gradients}
    rows = (zip(*repeat.own, strict=True) for repeat in repeats)
    for keys in itertools.chain.from_iterable(rows):
        if keys[1] in traced:  # of a period that was traced
            traced.update(keys)
    return tuple(node.name for node, key in joint.inputs.items() if key in traced)
