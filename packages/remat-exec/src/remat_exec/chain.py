"""One step as chained autograd Functions, driven by one backward generator.

The forward runs in the Function made last, so its backward is called first and takes over the
gradients of the outputs. Before it in the chain stands one Function per group of gradients; each
resumes the generator until its group is final and hands the group to autograd, which accumulates it
into `.grad` (or sends it over the network) while the rest is still to be computed. Where a compiled
function calls `backward`, TorchDynamo would trace them: it is told not to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from remat_exec.errors import BackwardError, SecondDerivative
from remat_exec.repeats import Repeats
from remat_exec.step_code import StepCode
from remat_exec.step_run import Observers, StepRun

__all__ = ["run_step"]


def run_step(
    executable: StepCode,
    bound: list[Any],
    inputs: dict[str, torch.Tensor],
    observers: Observers,
    repeats: Repeats | None,
) -> tuple[tuple[torch.Tensor, ...], Callable[[], None]]:
    """Run the forward; give what autograd is handed, connected to the inputs by variable.

    The second is called to give memory back, if there is a leaner plan. `repeats` is as `StepRun`
    says.
    """
    step = StepRun(executable, bound, observers, repeats)
    device = executable.device
    token: torch.Tensor | None = None
    for index, group in reversed(list(enumerate(executable.groups))):
        sources = [inputs[name] for name in group]
        token = _apply(_GroupFunction, step, index, device, token, *sources)
    with torch.autocast(device.type, enabled=False):
        handed: tuple[torch.Tensor, ...] = _apply(_ForwardFunction, step, token)
    step.watch(handed)
    return handed, _dropper(weakref.ref(step))


def _dropper(ref: weakref.ref[StepRun]) -> Callable[[], None]:
    def drop() -> None:
        step = ref()
        if step is not None:
            step.drop()

    return drop


def _is_batched(gradient: torch.Tensor | None) -> bool:
    """Whether a tensor stands for several at once, as in autograd's own vmap over gradients."""
    return gradient is not None and torch._C._dispatch_keys(gradient).has("Batched")


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]


def _no_view(output: torch.Tensor) -> torch.Tensor:
    """Give an output that was made in place in a view as what eager gives: no view of anything.

    Torch lets nobody change a view in place that a function of Python returns. Both have one
    version, so a change is seen if the backward reads it.
    """
    return output.detach() if output._is_view() else output


class _ForwardFunction(torch.autograd.Function):
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx: Any, step: StepRun, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        returned, saved = step.run_forward()
        returned = [_no_view(each) for each in returned]
        ctx.step, ctx.token = step, torch.empty_like(token)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        constant = step.executable.not_differentiable
        ctx.mark_non_differentiable(*(returned[position] for position in constant))
        return tuple(returned)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # the graph that create_graph asks for would miss this part
            raise SecondDerivative(
                "create_graph=True asks for a gradient of a gradient, which a plan does not give. "
                "Let the forward ask for it by torch.autograd.grad, in a module that calls this "
                "one, and rematerialize that; or run the original module for it"
            )
        if any(_is_batched(gradient) for gradient in gradients):
            raise BackwardError(
                "is_grads_batched=True (or vectorize=True) asks for several gradients in one "
                "backward, and a plan has memory for one; run the original module for it"
            )
        step: StepRun = ctx.step
        try:
            saved = step.run_forward_again() if step.started else list(ctx.saved_tensors)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise BackwardError(
                "an input, a parameter or an output of the model was changed in place between "
                "forward and backward, and the plan reads it again; run backward before changing "
                "it, or change a copy (tensor.clone())"
            ) from error
        step.start(ctx, saved, list(gradients))
        return None, ctx.token


class _GroupFunction(torch.autograd.Function):
    """Gives out one group of gradients.

    The tokens that chain these, empty, are on the program's device: autograd runs the backward of a
    function on the stream on which its outputs were made.
    """

    @staticmethod
    def forward(
        ctx: Any,
        step: StepRun,
        index: int,
        device: torch.device,
        token: torch.Tensor | None,
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.step, ctx.index, ctx.token = step, index, token
        return torch.empty(0, device=device)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        step: StepRun = ctx.step
        gradient = None if ctx.token is None else torch.empty_like(ctx.token)
        return (None, None, None, gradient, *step.take(ctx.index))
