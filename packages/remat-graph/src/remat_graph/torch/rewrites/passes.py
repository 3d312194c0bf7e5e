"""What happens to a joint graph between tracing and lowering: an ordered list of named passes.

`ONCE` are those over what was traced, whatever gradients come; `EACH` those over a copy of it for
the gradients that do. Each keeps what the graph computes. To find which of them is at fault,
`REMAT_PASSES=-merge-equal,-drop-copies` leaves passes out, but for those without which a plan would
be wrong.
"""

from __future__ import annotations

import difflib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from remat_graph.torch.cost.strides import RealStrides
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.rewrites.attention import name_causal_masks
from remat_graph.torch.rewrites.embeddings import add_rows
from remat_graph.torch.rewrites.gradients import (
    drop_missing,
    merge_tangents,
    separate_gradients,
)
from remat_graph.torch.rewrites.halves import drop_dead, forward_first
from remat_graph.torch.rewrites.inputs import merge_tied, pin_mutated
from remat_graph.torch.rewrites.listing import listing
from remat_graph.torch.rewrites.move_to_cuda import move_to_cuda
from remat_graph.torch.rewrites.propagate import propagate
from remat_graph.torch.rewrites.simplify import (
    drop_copies,
    drop_statistics,
    merge_equal,
    merge_items,
)
from remat_graph.torch.tracing.joint import Joint, Key

__all__ = ["EACH", "ONCE", "Pass", "PassRun", "Setting", "check_passes", "run_passes"]

logger = logging.getLogger(__name__)

_VARIABLE = "REMAT_PASSES"


@dataclass(frozen=True, slots=True)
class Setting:
    """What passes go by besides the graph.

    `tensors` are those of the inputs; `to_cuda` says that the graph was traced on the host for a
    CUDA device. `missing` are the positions, among what the forward returns, of gradients that do
    not come. `real` corrects layouts.
    """

    tensors: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    to_cuda: bool = False
    missing: frozenset[int] = frozenset()
    real: RealStrides | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """A rewrite of a joint graph: it may change the one that it is given, and returns the new one.

    `required` says what would be wrong without it; empty if it may be left out.
    """

    name: str
    does: str
    run: Callable[[Joint, Setting], Joint]
    required: str = ""


@dataclass(frozen=True, slots=True)
class PassRun:
    """The program before and after a pass, line by line, and how long the pass took."""

    name: str
    does: str
    seconds: float
    before: str
    after: str

    @property
    def diff(self) -> str:
        """The lines that the pass changed, with three around them; empty if it changed nothing."""
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), "before", "after", lineterm=""
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        """Say what the pass does, and show what it did."""
        return f"{self.name} ({self.seconds:.3f} s): {self.does}\n{self.diff or 'no change'}\n"


_PROPAGATE = Pass(
    "propagate",
    "Runs the graph on fake tensors, to see which results share their memory.",
    lambda joint, setting: propagate(joint, setting.real),
    required="views would be taken for tensors of their own",
)
_DROP_DEAD = Pass(
    "drop-dead",
    "Removes what nothing needs, but for draws of random numbers.",
    lambda joint, _: drop_dead(joint),
    required="the program would read gradients that do not come",
)

ONCE = (
    Pass(
        "move-to-cuda",
        "Takes a graph that was traced on the host for a CUDA device to be there.",
        lambda joint, setting: move_to_cuda(joint) if setting.to_cuda else joint,
        required="costs and memory would be those of the host",
    ),
    Pass(
        "merge-tied",
        "Makes inputs that are one tensor one input, whose gradient is the sum of theirs.",
        lambda joint, setting: merge_tied(joint, setting.tensors),
        required="a tied parameter would get a part of its gradient",
    ),
    Pass(
        "merge-tangents",
        "Gives an output that is returned several times one gradient.",
        lambda joint, _: merge_tangents(joint),
        required="autograd gives one sum for them, and the program would wait for several",
    ),
)
EACH = (
    Pass(
        "drop-missing",
        "Takes out what a gradient that does not come would have been multiplied with.",
        lambda joint, setting: drop_missing(joint, setting.missing),
        required="the program would read gradients that do not come",
    ),
    Pass(
        "merge-items",
        "Takes each item of an operator's tuple once.",
        lambda joint, _: merge_items(joint),
        required="a result would have several names, of which the program knows one",
    ),
    Pass(
        "drop-statistics",
        "Lets backwards of batch norm in training not read running statistics, which they ignore.",
        lambda joint, _: drop_statistics(joint),
    ),
    _DROP_DEAD,
    Pass(
        "forward-first",
        "Moves forward operators that were traced after backward ones before them.",
        lambda joint, _: forward_first(joint),
        required="the forward half would read what is made in the backward half",
    ),
    _PROPAGATE,
    Pass(
        "drop-copies",
        "Uses the source of a copy in place of the copy, where nobody can tell.",
        lambda joint, _: drop_copies(joint),
    ),
    Pass(
        "add-rows",
        "Adds the rows of an embedding's gradient to the other gradient of its table.",
        lambda joint, _: add_rows(joint),
    ),
    Pass(
        "merge-equal",
        "Computes once what the forward computes several times from the same.",
        lambda joint, _: merge_equal(joint),
    ),
    Pass(
        "name-causal-masks",
        "Replaces masks of attention that are the causal one by `is_causal=True`.",
        lambda joint, _: name_causal_masks(joint),
    ),
    _DROP_DEAD,
    _PROPAGATE,
    Pass(
        "pin-mutated",
        "Copies inputs that the forward changes and the backward reads as they were.",
        lambda joint, _: pin_mutated(joint),
        required="the backward would read data that the forward has changed",
    ),
    Pass(
        "separate-gradients",
        "Gives each gradient memory of its own, in the layout of its leaf.",
        lambda joint, _: separate_gradients(joint),
        required="two `.grad` would share their memory",
    ),
    _PROPAGATE,
)


def run_passes(
    passes: Collection[Pass],
    joint: Joint,
    setting: Setting,
    *,
    leave_out: Collection[str] = (),
    watch: Callable[[PassRun], None] | None = None,
) -> Joint:
    """Run passes in their order, but for those of these names and those that the user leaves out.

    The graph that is given may be changed. `watch` sees the program before and after each.

    Raises:
        CaptureError: if `REMAT_PASSES` names a pass that is not there or is required, or a pass
            refuses the graph.
    """
    skipped = {*leave_out, *_left_out()}
    for each in passes:
        if each.name in skipped:
            continue
        before = "" if watch is None else listing(joint)
        start = time.perf_counter()
        joint = each.run(joint, setting)
        seconds = time.perf_counter() - start
        logger.debug("pass %s took %.3f s", each.name, seconds)
        if watch is not None:
            watch(PassRun(each.name, each.does, seconds, before, listing(joint)))
    return joint


def check_passes() -> None:
    """See before anything is traced that `REMAT_PASSES` can be followed.

    Raises:
        CaptureError: if it names a pass that is not there, or is required.
    """
    for _ in _left_out():
        pass


def _left_out() -> Iterator[str]:
    """Read the names of the passes that the user leaves out."""
    setting = os.environ.get(_VARIABLE, "")
    by_name = {each.name: each for each in (*ONCE, *EACH)}
    for item in filter(None, map(str.strip, setting.split(","))):
        name = item.removeprefix("-")
        if name == item or name not in by_name:
            raise CaptureError(
                f"{_VARIABLE} has {item!r}; give '-name' for each pass to leave out, of "
                f"{', '.join(name for name, each in by_name.items() if not each.required)}"
            )
        if by_name[name].required:
            raise CaptureError(
                f"{_VARIABLE} has {item!r}, and a plan without that pass would be wrong: "
                f"{by_name[name].required}"
            )
        yield name
