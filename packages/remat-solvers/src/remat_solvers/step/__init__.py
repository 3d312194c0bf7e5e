"""Several regions of one training step under one budget.

`options` says what a schedule of a region costs the step, `region` finds such options with bounds
on all schedules, `choice` chooses one for every region by the program of `table`.
"""

from remat_solvers.step.choice import StepChoice, StepTooLarge, TimeStep, choose, step_bound
from remat_solvers.step.options import (
    ANY_BYTES,
    RegionBound,
    RegionFront,
    RegionOption,
    incoming_bytes,
    measure_option,
    weigh_options,
)
from remat_solvers.step.region import front_from_schedules, refined_options, region_front

__all__ = [
    "ANY_BYTES",
    "RegionBound",
    "RegionFront",
    "RegionOption",
    "StepChoice",
    "StepTooLarge",
    "TimeStep",
    "choose",
    "front_from_schedules",
    "incoming_bytes",
    "measure_option",
    "refined_options",
    "region_front",
    "step_bound",
    "weigh_options",
]
