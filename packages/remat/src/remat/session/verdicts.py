"""What a warning says of a step over the budget, and why."""

from __future__ import annotations

__all__ = [
    "AT_FIRST",
    "BY_CALLS",
    "BY_PLAN",
    "FORGOTTEN",
    "IN_PART",
    "LOSS_OVER",
    "NEXT",
    "OFF_PLAN",
    "OTHERS_EXPECTED",
    "OTHER_BLOCKS",
    "READ",
    "REFUSED",
    "SIZES_OVER",
    "UNFITTING",
    "WITHOUT",
]

BY_PLAN = "what runs between the regions took more than in the step that was planned by"
OFF_PLAN = "it was not planned for, or its calls of regions were not"
UNFITTING = (
    "no plan fits what it showed, for which {:,} bytes would do, but some of it is made but once: "
    "later steps decide"
)
AT_FIRST = "regions were planned in it, and what is made but once counts"
NEXT = "the next may, too, until one is planned for"
BY_CALLS = (
    "so much its calls of regions keep and take at once by their schedules, with the gradients "
    "that they gave; what runs between them was not recorded"
)
FORGOTTEN = "no plan has room for what it asked for, so that is forgotten"
WITHOUT = "no plan fits with all outputs made; from now on those beside the loss are made when read"
IN_PART = "its calls of regions were not planned for; it was recorded from the first of these on"
OTHERS_EXPECTED = "more calls were expected before its backward, which share the budget"
REFUSED = "no plan of its calls fits, so steps of several calls are refused from now on"
READ = (
    "an output that steps do not make was read in it, before the backward. That output, and what "
    "the loop made of it, is in no plan. Name it in outputs=, or read it after the backward"
)
SIZES_OVER = (
    "its sizes take more than sizes that are near them. Its gradients are right, and from now on "
    "each new size is rehearsed"
)
LOSS_OVER = (
    "the code between its forward and its backward, such as a loss, takes {:,} bytes beside the "
    "gradients of the outputs, where {:,} were allowed. Its gradients are right, and from the next "
    "forward on this is planned for; with loss= it is at once"
)
OTHER_BLOCKS = ", or its tensors got larger blocks than those of the step that was measured"
