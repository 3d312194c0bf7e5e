"""Running a plan: one step as chained autograd Functions, driven by one backward generator.

The forward runs in the Function made last, so its backward is called first and takes over the
gradients of the outputs. Before it in the chain stands one Function per group of gradients; each
resumes the generator until its group is final and hands the group to autograd, which accumulates it
into `.grad` (or sends it over the network) while the rest is still to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from remat_exec.codegen import Code, Group, generate
from remat_exec.errors import BackwardError, BudgetExceeded
from remat_exec.fallback import backward_from
from remat_exec.measure import Peak, generators_restored, measure_peak
from remat_graph import Schedule
from remat_graph.torch import Capture, Program, TensorFacts, Variable, tensor_at

__all__ = ["Executable", "Variant", "stand_in_loss"]


@dataclass(frozen=True, slots=True)
class Variant:
    """A backward for another set of missing gradients, over the forward of the planned one."""

    missing: frozenset[int]
    code: Code
    program: Program


@dataclass
class Executable:
    """A plan that can be run, again and again and by several modules at once.

    `budget_bytes` bounds what an unplanned backward may take; `on_unplanned` is told which
    gradients were missing when one does not fit.

    Raises:
        InvalidSchedule: if the simulator rejects the schedule.
    """

    capture: Capture
    schedule: Schedule
    budget_bytes: int | None = None
    on_unplanned: Callable[[frozenset[int]], None] | None = None
    _variants: dict[frozenset[int], Variant] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        several = len(self.capture.program.tangents) + len(self.capture.missing) > 1
        self.code = generate(
            self.capture.program, self.capture.graph, self.schedule, save_all=several
        )
        self.may_vary = several
        returned = self.capture.program.returned
        differentiable = {*self.capture.program.tangents.values(), *self.capture.missing}
        self.not_differentiable = tuple(set(range(len(returned))) - differentiable)
        missing = self.capture.missing
        self._variants[missing] = Variant(missing, self.code, self.capture.program)

    def __deepcopy__(self, memo: dict[int, Any]) -> Executable:
        """Return the executable itself: it holds no state of any module."""
        return self

    @property
    def source(self) -> str:
        """The generated code."""
        return self.code.source

    def bind(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> list[Any]:
        """Collect the live tensors that the program reads, in its order."""
        program = self.capture.program
        bound: list[Any] = [tensor_at(module, tensors, i.kind, i.key) for i in program.inputs]
        bound.extend(program.constants.values())
        return bound

    def __call__(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the forward; give the user's output tensors, connected to autograd."""
        bound = self.bind(module, tensors)
        step = _Step(self, bound)
        program = self.capture.program
        by_name = dict(zip((i.variable for i in program.inputs), bound, strict=False))
        token: torch.Tensor | None = None
        for index in reversed(range(len(self.code.groups))):
            inputs = [by_name[name] for name in self.code.groups[index].inputs]
            token = _apply(_GroupFunction, step, index, token, *inputs)
        with torch.autocast(_device_type(program), enabled=False):
            returned = _apply(_ForwardFunction, step, token)
        return self._outputs(returned, by_name)

    def rehearse(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> Peak:
        """Run one forward and backward for its peak alone, changing nothing.

        Gradients go nowhere, writes go to copies, and the generators are put back. The gradient of
        each output is ones.
        """
        program = self.capture.program
        bound = self.bind(module, tensors)
        written = {write.target for write in program.writes.values()}
        for position, item in enumerate(program.inputs):
            if item.variable in written:
                bound[position] = bound[position].clone()
        device = torch.device(_device_type(program))
        with (
            generators_restored(device),
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
            measure_peak(device) as peak,
        ):
            self._run_without_autograd(bound)
        return peak

    def _run_without_autograd(self, bound: list[Any]) -> None:
        program = self.capture.program
        states: dict[str, Any] = {}
        returned, saved = self.code.forward(list(bound), states)
        outputs = [returned[position] for position in program.tangents.values()]
        _kept_by_loss, tangents = stand_in_loss(outputs)
        del outputs
        backward = self.code.backward(saved, tangents, states)
        gradients: list[torch.Tensor] = []
        for given in backward:
            gradients.extend(given or ())

    def _outputs(
        self, returned: tuple[torch.Tensor, ...], inputs: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        program = self.capture.program
        made = {**inputs, **dict(zip(program.returned, returned, strict=True))}
        outputs = []
        for output in program.outputs:
            tensor = made.get(output.variable)
            if output.kind == "input":
                tensor = made[output.base]
            if tensor is None:
                tensor = _view(program, output.variable, output.base, made[output.base])
            if tensor.requires_grad and not output.requires_grad:
                tensor = tensor.detach()
            outputs.append(tensor)
        return outputs

    def _make_variant(self, missing: frozenset[int]) -> Variant:
        other = self.capture.variant(missing)
        if _forward_order(other.program) != _forward_order(self.capture.program):
            raise BackwardError(
                "this backward, over other outputs than planned for, needs another forward; "
                "run forward again, it will be planned anew"
            )
        schedule = backward_from(other.graph, self.schedule)
        code = generate(other.program, other.graph, schedule, save_all=True)
        return Variant(missing, code, other.program)

    def replan(self, missing: frozenset[int]) -> None:
        """Tell whoever plans that a backward without these gradients could not be run."""
        if self.on_unplanned is not None:
            self.on_unplanned(missing)

    def variant(self, missing: frozenset[int]) -> Variant:
        """Find the backward for when the gradients at these positions do not come.

        Raises:
            BackwardError: if it needs what the planned forward did not keep.
            BudgetExceeded: if it takes more memory than the budget.
        """
        variant = self._variants.get(missing)
        if variant is None:
            try:
                variant = self._make_variant(missing)
            except BackwardError:
                self.replan(missing)
                raise
            self._variants[missing] = variant
        if self.budget_bytes is not None and variant.code.peak_bytes > self.budget_bytes:
            self.replan(missing)
            raise BudgetExceeded(
                f"this backward, over other outputs than the plan was made for, would take "
                f"{variant.code.peak_bytes} bytes of a budget of {self.budget_bytes}; "
                f"run forward again, it will be planned anew",
                self.budget_bytes,
                variant.code.peak_bytes,
            )
        return variant


def stand_in_loss(outputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Take the memory that a loss outside the module is allowed; give gradients of ones.

    For each output that is no scalar that is one buffer of its size while the loss runs (the
    workspace of the graph's op `loss`), and one that the loss keeps, given first.
    """
    large = [output for output in outputs if output.ndim > 0]
    kept = [torch.empty_like(output) for output in large]
    while_running = [torch.empty_like(output) for output in large]
    gradients = [torch.ones_like(output) for output in outputs]
    del while_running
    return kept, gradients


def _forward_order(program: Program) -> tuple[str, ...]:
    return program.order[: program.order.index("loss")]


def _device_type(program: Program) -> str:
    kinds = {facts.device.type for facts in program.facts.values()}
    return next((kind for kind in sorted(kinds) if kind != "cpu"), "cpu")


def _view(program: Program, variable: str, base: str, tensor: torch.Tensor) -> torch.Tensor:
    """Make a view outside the differentiated program, so that autograd knows it as one."""
    chain = program.view_chain(variable, base)
    if chain is None:
        facts = program.facts[variable]
        return tensor.as_strided(facts.shape, facts.stride, facts.offset)
    made: dict[str, Any] = {base: tensor}
    for call in chain:
        args, kwargs = pytree.tree_map(
            lambda item: made[item.name] if isinstance(item, Variable) else item,
            (call.args, dict(call.kwargs)),
            is_leaf=lambda item: isinstance(item, Variable),
        )
        given = call.target(*args, **kwargs)
        parts = list(given) if call.sequence else [given]
        made.update({n: p for n, p in zip(call.results, parts, strict=True) if n is not None})
    result: torch.Tensor = made[variable]
    return result


class _Step:
    """What one forward hands to its backward."""

    def __init__(self, executable: Executable, bound: list[Any]) -> None:
        self.executable = executable
        self.states: dict[str, Any] = {}
        self.started = False
        self._bound = bound
        self._versions: list[int | None] = []
        self._backward: Iterator[list[torch.Tensor] | None] | None = None
        self._upcoming: list[Group] = []
        self._final: dict[str, torch.Tensor] = {}

    def run_forward(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        returned, saved = self.executable.code.forward(list(self._bound), self.states)
        if self.executable.may_vary:
            self._versions = [getattr(item, "_version", None) for item in self._bound]
        else:
            self._bound = []
        return returned, saved

    def start(self, saved: list[Any], gradients: list[torch.Tensor | None]) -> None:
        """Choose the backward for the gradients that came, and let it take them over."""
        self.started = True
        capture = self.executable.capture
        differentiable = {*capture.program.tangents.values(), *capture.missing}
        missing = frozenset(p for p in differentiable if gradients[p] is None)
        variant = self.executable.variant(missing)
        if variant.code is not self.executable.code:
            saved = self._saved_for(variant, saved)
        tangents = [
            _as_planned(gradients[position], variant.program.facts[name])
            for name, position in variant.program.tangents.items()
        ]
        gradients.clear()
        self._bound, self._versions = [], []
        self._upcoming = list(variant.code.groups)
        self._backward = variant.code.backward(saved, tangents, self.states)
        next(self._backward)

    def _saved_for(self, variant: Variant, saved: list[Any]) -> list[Any]:
        """Pick what an unplanned backward reads: it may want other inputs than the planned one."""
        program = variant.program
        names = (*(i.variable for i in program.inputs), *program.constants)
        kept = dict(zip(self.executable.code.saved, saved, strict=True))
        for name, item, version in zip(names, self._bound, self._versions, strict=True):
            if name in variant.code.saved and name not in kept:
                if version is not None and item._version != version:
                    raise BackwardError(
                        f"{name}, a parameter or input, was changed in place between forward and "
                        f"backward; run backward before changing it"
                    )
                kept[name] = item
        lacking = [name for name in variant.code.saved if name not in kept]
        if lacking:
            self.executable.replan(variant.missing)
            raise BackwardError(
                f"this backward, over other outputs than planned for, reads {lacking[0]}, which "
                f"the plan does not keep; run forward again, it will be planned anew"
            )
        return [kept[name] for name in variant.code.saved]

    def take(self, index: int) -> tuple[torch.Tensor | None, ...]:
        """Run on until the gradients of planned group `index` are final, and let go of them."""
        wanted = self.executable.code.groups[index].inputs
        to_come = {name for group in self._upcoming for name in group.inputs}
        while to_come.intersection(wanted):
            if self._backward is None:
                raise BackwardError("the backward ended early; please report it")
            group = self._upcoming.pop(0)
            to_come.difference_update(group.inputs)
            given = next(self._backward) or []
            self._final.update(zip(group.inputs, given, strict=True))
            given.clear()
        if not self._upcoming:
            self._backward = None
        return tuple(self._final.pop(name, None) for name in wanted)


def _as_planned(gradient: torch.Tensor | None, facts: TensorFacts) -> torch.Tensor:
    """Bring a gradient into the layout that the graph was captured with."""
    if gradient is None:
        raise BackwardError("a gradient that the plan reads is missing; please report it")
    if tuple(gradient.stride()) == facts.stride or gradient.numel() == 0:
        return gradient
    planned = torch.empty_strided(
        facts.shape, facts.stride, dtype=facts.dtype, device=gradient.device
    )
    return planned.copy_(gradient)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]


class _ForwardFunction(torch.autograd.Function):
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx: Any, step: _Step, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        returned, saved = step.run_forward()
        ctx.step = step
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        constant = step.executable.not_differentiable
        ctx.mark_non_differentiable(*(returned[position] for position in constant))
        return tuple(returned)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # the graph that create_graph asks for would miss this part
            raise BackwardError(
                "create_graph=True asks for a gradient of a gradient, which a plan does not give; "
                "run the original module for it"
            )
        step: _Step = ctx.step
        if step.started:
            raise BackwardError(
                "backward runs a second time over the same forward, but its memory is given back "
                "as it goes; run forward again, or add the losses up and run backward once"
            )
        saved = list(ctx.saved_tensors)
        step.start(saved, list(gradients))
        return None, torch.empty(0)


class _GroupFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: _Step, index: int, token: torch.Tensor | None, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.step, ctx.index, ctx.last = step, index, token is None
        return torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        step: _Step = ctx.step
        return (None, None, None if ctx.last else torch.empty(0), *step.take(ctx.index))
