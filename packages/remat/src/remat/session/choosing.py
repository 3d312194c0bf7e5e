"""Chooses an option for every call of a recorded step, within the room that it may take.

From the record follow the moments at which the step must fit, and one program chooses a schedule
for every call (`remat_solvers.step`). What is left over is given to the kinds of regions that
compute most again, whose options are refined once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from remat.plans.regions import peak_of
from remat.session.kinds import RegionKind
from remat.session.recording import Recorded
from remat_solvers.step import (
    RegionFront,
    RegionOption,
    StepChoice,
    TimeStep,
    choose,
    refined_options,
)

__all__ = ["CHOICE_SECONDS", "WORTH_REFINING", "choose_options", "moments_of", "peak_by"]

CHOICE_SECONDS = 5.0
WORTH_REFINING = 0.01  # of the budget, left over
_REFINE_SECONDS = 0.5


def choose_options(kinds: Sequence[RegionKind], record: Recorded, room: int) -> list[RegionOption]:
    """Choose; then solve each kind of region again for what is left over, and choose again.

    `kinds` are those of the calls, in order; what is solved again is added to their options.

    Raises:
        BudgetTooSmall: if no options of the regions fit.
    """
    choice = _choose(kinds, record, room)
    left = room - choice.peak_bytes
    if left >= WORTH_REFINING * room:
        _refine(kinds, choice, left)
        choice = _choose(kinds, record, room)
    return [kind.front.options[index] for kind, index in zip(kinds, choice.indices, strict=True)]


def _choose(kinds: Sequence[RegionKind], record: Recorded, room: int) -> StepChoice:
    options = [
        tuple(_with_inputs(kind, record, call, option) for option in kind.front.options)
        for call, kind in enumerate(kinds)
    ]
    calls = [1] * len(kinds)
    return choose(options, calls, record.moments, room, limit_seconds=CHOICE_SECONDS)


def _refine(kinds: Sequence[RegionKind], choice: StepChoice, left: int) -> None:
    """Add to the options of what computes again some that keep more, of what is left over."""
    wanted: dict[int, tuple[RegionFront, set[RegionOption]]] = {}
    for kind, index in zip(kinds, choice.indices, strict=True):
        option = kind.front.options[index]
        if option.time > kind.front.graph.time:
            wanted.setdefault(id(kind.front), (kind.front, set()))[1].add(option)
    better: dict[int, RegionFront] = {}
    for key, (front, options) in wanted.items():
        better[key] = front
        for option in options:
            better[key] = refined_options(
                better[key],
                kept_bytes=option.kept_bytes + left // len(kinds),
                peak_bytes=option.peak_bytes + left,
                limit_seconds=_REFINE_SECONDS / len(options),
            )
    for kind in dict.fromkeys(kinds):
        kind.front = better.get(id(kind.front), kind.front)


def _with_inputs(
    kind: RegionKind, record: Recorded, call: int, option: RegionOption
) -> RegionOption:
    """Give an option with the inputs that it holds, and the one that was recorded did not.

    And with outputs that others hold in its backward, and the recorded one read.
    """
    inputs, outputs = _held_anew(kind, record, call, option)
    if not (inputs or outputs):
        return option
    kept, backward = option.kept_bytes + inputs, option.backward_bytes + inputs + outputs
    return replace(option, kept_bytes=kept, backward_bytes=backward)


def _held_anew(
    kind: RegionKind, record: Recorded, call: int, option: RegionOption
) -> tuple[int, int]:
    """Give the bytes of inputs that an option holds, and the one that was recorded did not.

    And those of outputs that others hold in its backward, and the recorded one read.
    """
    inputs = outputs = 0
    if record.released_outputs[call]:
        inputs = record.held_anew(call, kind.held_inputs(option))
    if record.held_outputs and record.held_outputs[call]:
        outputs = record.held_by_others(call, kind.let_go(option, droppable=False))
    return inputs, outputs


def moments_of(
    kinds: Sequence[RegionKind], record: Recorded, options: Sequence[RegionOption]
) -> tuple[TimeStep, ...]:
    """Give the moments of a recorded step whose calls run by these options."""
    anew = [
        _held_anew(kind, record, call, option)
        for call, (kind, option) in enumerate(zip(kinds, options, strict=True))
    ]
    return record.moments_with(anew) if any(map(any, anew)) else record.moments


def peak_by(kinds: Sequence[RegionKind], record: Recorded, options: Sequence[RegionOption]) -> int:
    """Give the peak of a recorded step whose calls run by these options."""
    return peak_of(moments_of(kinds, record, options), options)
