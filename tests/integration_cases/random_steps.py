"""Training steps of a drawn module, in eager and within a budget, and what each leaves behind."""

import random
import warnings
from dataclasses import dataclass, replace

import torch
from torch._dynamo.utils import counters

import remat
from remat_exec import measure_peak
from remat_graph.torch import flatten

__all__ = ["NotTrainable", "Steps", "differences", "in_eager", "planned"]

STORING = "aot_eager_default_partitioner"  # aot_eager recomputes by a minimum cut
WARM_STEPS = 4  # until plans are settled: what the backward shows is learnt, regions are recorded
STEPS = 5
OUR_ERRORS = (remat.RematError, remat.CaptureError, remat.ExecutionError, remat.SolverError)


class NotTrainable(Exception):
    """Eager cannot train the module."""


@dataclass
class Steps:
    """What the steps of one model left behind, by name, and the peak of those measured.

    `peaks` leave out what no plan can know of, `whole_peaks` do not.
    `breaks` are those of its plan. Where `torch.compile` meets any, a step may begin in eager, or
    be all in eager; then what it takes is not seen (docs/limits.md), and no peak is measured.
    """

    tensors: dict[str, torch.Tensor | None]
    peaks: list[int]
    arguments: tuple
    breaks: tuple[str, ...] = ()
    whole_peaks: tuple[int, ...] = ()


def in_eager(drawn):
    """Train in eager.

    Raises:
        NotTrainable: if eager cannot, or makes numbers that are not finite.
    """
    model = drawn.make()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps = _train(model, drawn, STEPS - 1)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise NotTrainable from error
    if not all(t is None or t.isfinite().all() for t in steps.tensors.values()):
        raise NotTrainable
    return steps


def planned(drawn, budget, way):
    """Train within a budget; `way` is how the module is handed over."""
    model = drawn.make()
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "compiled":
            plans = []
            options = {"budget": budget, "limit_seconds": 0.1, "on_plan": plans.append}
            model = torch.compile(model, backend="remat", options=options)
            steps = _train(model, drawn, WARM_STEPS)
            breaks = getattr(plans[-1], "breaks", ()) if plans else ()
            is_seen = plans and not breaks
            return replace(steps, peaks=steps.peaks if is_seen else [], breaks=breaks)
        if way == STORING:
            model = torch.compile(model, backend=STORING)
        else:
            args = drawn.call() if way == "example" else None
            model = remat.rematerialize(model, args, budget=budget, limit_seconds=0.1)
        steps = _train(model, drawn, WARM_STEPS)
        return replace(steps, breaks=getattr(getattr(model, "plan", None), "breaks", ()))


def _train(model, drawn, warm_steps):
    tensors, peaks, whole, arguments = {}, [], [], ()
    optimizer = None
    if list(model.parameters()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for step in range(STEPS):
        torch.manual_seed(step)
        random.seed(step)
        arguments = drawn.call()
        model.zero_grad()

        def keep(name, tensor, step=step):
            tensors[f"{name} of step {step}"] = None if tensor is None else tensor.detach().clone()

        if step < warm_steps:
            outputs, loss = _step(model, drawn, arguments)
        else:
            before = _compilations()
            with measure_peak() as peak:
                outputs, loss = _step(model, drawn, arguments)
            whole.append(peak.peak_bytes)
            if _compilations() == before:  # which copy states of generators
                outside = _outside(drawn, arguments, flatten(outputs)[0]) + _in_hooks(model)
                peaks.append(peak.peak_bytes - outside)
        keep("loss", loss)
        keep("random state", torch.get_rng_state())
        for i, output in enumerate(flatten(outputs)[0]):
            keep(f"output {i}", output)
        for i, argument in enumerate(arguments):
            keep(f"argument {i}", argument)
            if argument.is_leaf:
                keep(f"gradient of argument {i}", argument.grad)
        for name, parameter in model.named_parameters():
            keep(f"gradient of {name}".replace("_orig_mod.", ""), parameter.grad)
        del outputs, loss
        if optimizer is not None:
            optimizer.step()
        for name, tensor in model.state_dict().items():
            keep(name.replace("_orig_mod.", ""), tensor)
    return Steps(tensors, peaks, arguments, whole_peaks=tuple(whole))


def _compilations():
    return counters["stats"]["unique_graphs"]


def _outside(drawn, arguments, outputs):
    """Bound what the step takes that no plan can know of.

    That is the loss's scalars, the gradients of what arguments are made of, and the loss of outputs
    that are arguments or other outputs, too.
    """
    size = 64 * len(outputs)
    known = set()
    for argument in arguments:
        known.add(argument.untyped_storage().data_ptr())
        if argument.requires_grad and not argument.is_leaf:
            size += 2 * argument.untyped_storage().nbytes()
    for i in drawn.used:
        storage = outputs[i].untyped_storage()
        if storage.data_ptr() in known:
            size += 3 * storage.nbytes()
        known.add(storage.data_ptr())
    return size


def _in_hooks(model):
    """Bound what hooks of parameters take, one after the other."""
    hooked = [parameter for parameter in model.parameters() if parameter._backward_hooks]
    return max((parameter.untyped_storage().nbytes() for parameter in hooked), default=0)


def _step(model, drawn, arguments):
    outputs = model(*arguments)
    parts = flatten(outputs)[0]
    differentiated = [parts[i] for i in sorted(drawn.used) if parts[i].requires_grad]
    given = {argument.untyped_storage().data_ptr() for argument in arguments}
    if all(part.untyped_storage().data_ptr() in given for part in differentiated):
        raise ValueError("nothing that the module makes is differentiated")
    losses = [(i + 1) * (part * part).mean() for i, part in enumerate(differentiated)]
    loss = sum(losses[1:], losses[0])
    loss.backward()
    return outputs, loss.detach()


def differences(got, expected):
    """Name what differs in any bit, with the largest difference where there is one."""
    found = {}
    for name, tensor in expected.tensors.items():
        other = got.tensors.get(name)
        if tensor is None or other is None:
            if tensor is not other:
                found[name] = f"{'none' if other is None else 'some'} where eager has other"
        elif tensor.shape != other.shape or tensor.dtype != other.dtype:
            found[name] = f"{other.dtype} {list(other.shape)}"
        elif name.startswith("output") and tensor.stride() != other.stride():
            found[name] = f"strides {other.stride()}, in eager {tensor.stride()}"
        elif not torch.equal(tensor, other):
            found[name] = float((tensor.double() - other.double()).abs().max())
    return found
