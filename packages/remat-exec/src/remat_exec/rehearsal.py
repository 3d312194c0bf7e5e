"""One step without autograd, as a rehearsal runs it: it holds what a step with autograd holds.

That is the user's outputs, what a loss keeps, and the gradients of the outputs.
"""

from __future__ import annotations

from typing import Any

import torch

from remat_exec.loss import Loss, as_handed, loss_gradients, stand_in_loss
from remat_exec.on_demand import OnDemand, Recipe
from remat_exec.outputs import Outputs, tangents_of
from remat_exec.step_code import StepCode

__all__ = ["run_without_autograd"]


def run_without_autograd(step: StepCode, bound: list[Any], loss: Loss | None) -> None:
    """Run the forward and the planned backward; `bound` are the tensors that the program reads.

    The gradients of the outputs come from `loss`, or are ones.
    """
    program = step.capture.program
    states: dict[str, Any] = {}
    plain = torch.autocast(step.device.type, enabled=False)
    later = None
    if step.recipes:
        later = OnDemand(step.capture.whole_program, step.recipes, bound, states, {}, _ignore)
    with plain:
        handed, saved = step.code.forward(list(bound), states)
    if later is not None:
        for recipe in step.recipes:
            handed[recipe.position] = later.output(recipe)
    del later
    _kept_by_loss, gradients = _gradients_of_handed(step, handed, bound, loss)
    released_outputs = step.capture.released_outputs
    _held_by_the_user = [t for position, t in enumerate(handed) if position not in released_outputs]
    del handed
    _held_by_autograd = tuple(gradients)
    with plain:
        tangents = tangents_of(program, program.tangents, gradients)
        backward = step.code.backward(saved, tangents, states)
        next(backward)
        del _held_by_autograd
        final: list[torch.Tensor] = []
        for group in step.code.groups:
            given = next(backward) or []
            if program.leaving.isdisjoint(group.inputs):
                final.extend(gradient for gradient in given if gradient is not None)
            given.clear()
        next(backward, None)


def _gradients_of_handed(
    step: StepCode, handed: list[torch.Tensor], bound: list[Any], loss: Loss | None
) -> tuple[object, list[torch.Tensor | None]]:
    """Give what a loss keeps, and the gradients of what autograd is handed."""
    program = step.capture.program
    expected = set(program.tangents.values())
    if loss is None:
        wanted = [tensor if at in expected else None for at, tensor in enumerate(handed)]
        return stand_in_loss(step.capture.loss, wanted, step.device)
    with torch.enable_grad():
        leaves = [
            tensor.detach().requires_grad_(position in expected)
            for position, tensor in enumerate(handed)
        ]
        by_name = dict(zip((i.variable for i in program.inputs), bound, strict=False))
        outputs = Outputs(step.whole_program, tuple(map(as_handed, leaves)), by_name).all()
        returned = step.capture.output_structure.rebuild(iter(outputs))
        del outputs
        gradients, kept_by_loss = loss_gradients(loss, returned, leaves)
    for position in expected:  # a loss need not use the same outputs every time
        if gradients[position] is None:
            gradients[position] = torch.zeros_like(handed[position])
    return kept_by_loss, gradients


def _ignore(recipe: Recipe) -> None:
    pass
