"""The statements of a plan: what exists at each point, is freed, made again, or run in place.

Views are made when first read, in as few calls as can be, and go with their buffer. `drawing` has
what runs random operators.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable, Mapping
from inspect import isfunction
from typing import Any

import torch

from remat_exec.autocast import run_lowered
from remat_exec.checksums import check, note
from remat_exec.drawing import draw, draw_again, draw_once
from remat_exec.errors import ExecutionError
from remat_exec.gradient_groups import Group, group_gradients
from remat_exec.pruning import prune_backward
from remat_exec.views import METHODS
from remat_graph import Compute, Graph, Step, freed_next, leaves
from remat_graph.torch import (
    Call,
    Kernel,
    Program,
    SlicedBody,
    TensorFacts,
    Variable,
    body_of,
    operator_of,
    results_of,
    run_fused,
    run_over,
)

__all__ = ["Writer", "zero_values"]


class Writer:
    """Writes the statements of one function, knowing which variables exist at each point."""

    def __init__(
        self,
        program: Program,
        replayed: set[str],
        bindings: dict[str, Any],
        shorter: Mapping[str, Call | str],
        computed: Iterable[str] = (),
        sizes: Mapping[float, str] | None = None,
    ) -> None:
        self.program = program
        self.sizes = sizes or {}
        self.facts: dict[str, str] = {}
        self.bodies: dict[str, str] = {}
        self.shorter = shorter
        self.replayed = replayed
        self.computed = set(computed)
        self.inputs = program.taken
        self.lines: list[str] = []
        self.bindings = bindings
        self.live: dict[str, None] = {}
        self.read_at_entry: set[str] = set()
        self.zero: frozenset[str] = frozenset()
        self.lowered: dict[str, torch.dtype | None] = {}
        self.partial: dict[str, Call] = {}
        self.compared: frozenset[str] = frozenset()
        self._graphs = {  # of an operator such as `torch.cond`: autograd could not save them
            name: constant
            for name, constant in program.constants.items()
            if not isinstance(constant, torch.Tensor)
        }
        self._entry: set[str] = set()
        self._bound: set[str] = set()
        self._handed = {program.storage[name] for name in program.held}
        self._of_value: dict[str, list[str]] = {}
        for variable, value in program.storage.items():
            self._of_value.setdefault(value, []).append(variable)

    @property
    def inputs_and_views(self) -> set[str]:
        """What is not to be saved as such: inputs are saved as inputs, views are made again."""
        return {*self.inputs, *self.program.views}

    def available(self, names: Iterable[str]) -> None:
        """Declare what exists when the function starts."""
        self.live.update(dict.fromkeys(names))
        self._entry.update(names)

    def receive(self, names: Iterable[str]) -> None:
        """Declare what the function unpacks first."""
        names = tuple(names)
        self.live.update(dict.fromkeys(names))
        self._bound.update(names)

    def run(self, steps: tuple[Step, ...]) -> None:
        """Write steps of the schedule."""
        for position in range(len(steps)):
            self.step(steps, position)

    def step(self, steps: tuple[Step, ...], position: int) -> None:
        """Write one step."""
        step = steps[position]
        if not isinstance(step, Compute):
            self._delete(v for v in self._of_value[step.value])
            return
        write = self.program.writes.get(step.op)
        if leaves(step.op) or self._is_zero(step.op):
            pass  # given out by `run_backward`; made of zeros where it is read
        elif write is not None:
            self._require(write.target)
            self._require(write.variable)
            self.lines.append(f"{write.target}.copy_({write.variable})")
        elif not self._in_place(step.op, steps, position):
            self._call(step.op)
        if step.op in self.compared:
            results = self.program.calls[step.op].results
            self.compare([name for name in results if name], again=step.op in self.computed)
        self.computed.add(step.op)

    def compare(self, names: Iterable[str], *, again: bool) -> None:
        """Write what keeps the checksums of variables, or sees `again` that they are the same."""
        listed = ", ".join(f"{name}={name}" for name in names)
        if listed:
            called = self._bind("check", check) if again else self._bind("note", note)
            self.lines.append(f"{called}(states, {listed})")

    def make(self, names: Iterable[str]) -> None:
        """Write what makes these variables out of others that are there."""
        for name in names:
            self._require(name)

    def run_backward(
        self, graph: Graph, steps: tuple[Step, ...], unwanted: frozenset[str] = frozenset()
    ) -> tuple[Group, ...]:
        """Write the backward half, giving out each gradient after the last step that touches it.

        Those of the inputs `unwanted` are given to nobody.
        """
        if unwanted:
            steps, self.partial = prune_backward(steps, graph, self.program, unwanted)
        due = group_gradients(self.program, graph, steps, unwanted)
        groups = []
        for group in due.get(-1, ()):
            groups.append(self._give_out(group))
        for position in range(len(steps)):
            self.step(steps, position)
            for group in due.get(position, ()):
                groups.append(self._give_out(group))
        return tuple(groups)

    def _give_out(self, inputs: tuple[str, ...]) -> Group:
        storage = self.program.storage
        gradients = [self.program.gradients[name] for name in inputs]
        shown = [None if storage[g] in self.zero else g for g in gradients]
        self.make(gradient for gradient in shown if gradient is not None)
        self.lines.append(f"given = [{', '.join(map(str, shown))}]")
        self._delete(v for g in gradients for v in self._of_value[storage[g]])
        self.lines.append("yield given")
        return Group(inputs)

    def _delete(self, names: Iterable[str]) -> None:
        gone = [name for name in dict.fromkeys(names) if name in self.live]
        if not gone:
            return
        for name in gone:
            del self.live[name]
            self._entry.discard(name)
        bound = [name for name in gone if name in self._bound]
        if bound:
            self.lines.append(f"del {', '.join(bound)}")
        self._bound.difference_update(bound)

    def _require(self, name: str) -> None:
        if name in self._graphs:
            return
        if name in self.live:
            if name in self._entry:
                self.read_at_entry.add(name)
                self._bound.add(name)
            return
        call = self.program.views.get(name)
        if call is None and self.program.storage[name] in self.zero:
            zeros, facts = self._bind("zeros", _zeros), f"{name}_facts__"
            self.facts[facts] = name
            self.lines.append(f"{name} = {zeros}({facts})")
            self._define(name)
            return
        if call is None:
            raise ExecutionError(f"the plan reads {name}, which is not there; please report it")
        shorter = self.shorter.get(name, call)
        if isinstance(shorter, str):
            self._require(shorter)
            self.lines.append(f"{name} = {shorter}")
            self._define(name)
            return
        for source in shorter.reads:
            self._require(source)
        self.lines.append(self._statement(shorter, list(shorter.results)))

    def _is_zero(self, op: str) -> bool:
        """Whether all that an op of the backward makes is zero, for want of a gradient."""
        call = self.program.calls.get(op) if self.zero else None
        if call is None or op not in self.program.backward_ops:
            return False
        outputs = {self.program.storage[name] for name in call.results if name is not None}
        return bool(outputs) and outputs <= self.zero

    def _in_place(self, op: str, steps: tuple[Step, ...], position: int) -> bool:
        """Write an op in the buffer of its first input, if it can and that is freed next.

        What the user was handed stays as it is: a plan only takes it to be let go of.
        """
        pairs = self.program.overwrites.get(op, ())
        gone = freed_next(steps, position) - self._handed if pairs else ()
        ending = [pair for pair in pairs if self.program.storage[pair[0]] in gone]
        if not ending:
            return False
        call = self.program.calls[op]
        for name in call.reads:
            self._require(name)
        if call.target is run_fused:
            self._run_over(call, {read for read, _ in pairs} - {read for read, _ in ending})
            self._delete(v for old, _ in ending for v in self._of_value[self.program.storage[old]])
            return True
        ((target, result),) = ending
        rest = ", ".join(self._argument(item) for item in call.args[1:])
        rest += "".join(f", {key}={self._argument(item)}" for key, item in call.kwargs.items())
        own = operator_of(call.target).in_place
        if own is not None:
            bound = self._bind_target(own)
            self.lines.append(f"{bound}({target}, {rest})")
        else:
            source, _, where = rest.partition(", ")
            part = self._bind_target(operator_of(call.target).part)
            self.lines.append(f"{part}({target}, {where}).copy_({source})")
        self.lines.append(f"{result} = {target}")
        self._define(result)
        self._delete(self._of_value[self.program.storage[target]])
        return True

    def _run_over(self, call: Call, copied: Collection[str]) -> None:
        """Write the call of a group over inputs that end in it, and over copies of others."""
        arguments = [self._argument(item) for item in call.args]
        arguments = [f"{name}.clone()" if name in copied else name for name in arguments]
        results = [str(name) for name in call.results]
        for name in results:
            self._define(name)
        over = self._bind("run_over", run_over)
        self.lines.append(f"[{', '.join(results)}] = {over}({', '.join(arguments)})")
        self._delete(self._stale(call))

    def _define(self, name: str) -> None:
        self.live[name] = None
        self._bound.add(name)
        self._entry.discard(name)

    def _call(self, op: str) -> None:
        call = self.partial.get(op) or self.program.calls[op]
        again = op in self.computed
        if again and call.replay is not None and self._is_written(call):
            call = call.replay
        for source in call.reads:
            self._require(source)
        through = ""
        if call.random is not None:
            through = self._drawn(op, str(call.random), again)
        elif op in self.lowered:
            through = self._lowered(op, call)
        self.lines.append(self._statement(call, list(call.results), through))
        self._delete(self._stale(call))

    def _stale(self, call: Call) -> list[str]:
        """List the views of what a call makes: they are of what it made before."""
        storage = self.program.storage
        outputs = {storage[name] for name in call.results if name is not None}
        return [v for value in outputs for v in self._of_value[value] if v in self.program.views]

    def _lowered(self, op: str, call: Call) -> str:
        """Write the start of a product in another type, up to the operator."""
        types = (self.lowered[op], self.program.facts[str(call.results[0])].dtype)
        bound = (self._bind(str(dtype).replace(".", "_"), dtype) for dtype in types)
        return f"{self._bind('run_lowered', run_lowered)}({', '.join(bound)}, "

    def _drawn(self, op: str, device: str, again: bool) -> str:
        """Write the start of a call that draws random numbers, up to the operator."""
        if op not in self.replayed:
            return f"{self._bind('draw_once', draw_once)}({device!r}, "
        function = self._bind("draw_again", draw_again) if again else self._bind("draw", draw)
        return f"{function}(states, {op!r}, {device!r}, "

    def _is_written(self, call: Call) -> bool:
        """Whether what only the first run makes has gone where it is written."""
        return all(
            write in self.computed
            for write, into in self.program.writes.items()
            if into.variable in call.results
        )

    def _statement(self, call: Call, results: list[str | None], through: str = "") -> str:
        named = [name for name in results if name is not None]
        for name in named:
            self._define(name)
        expression = self._expression(call, through)
        if not named:
            return expression
        if not call.sequence:
            return f"{named[0]} = {expression}"
        if len(named) == len(results):
            return f"[{', '.join(named)}] = {expression}"
        if len(named) == 1:
            return f"{named[0]} = {expression}[{results.index(named[0])}]"
        picked = ", ".join(f"made[{results.index(name)}]" for name in named)
        return f"made = {expression}; {', '.join(named)} = {picked}; del made"

    def _expression(self, call: Call, through: str) -> str:
        arguments = [self._argument(item) for item in call.args]
        if call.target in METHODS and not call.kwargs:
            return f"{arguments[0]}.{METHODS[call.target]}({', '.join(arguments[1:])})"
        arguments += [f"{key}={self._argument(item)}" for key, item in call.kwargs.items()]
        target = self._bind_target(call.target)
        start = f"{through}{target}, " if through else f"{target}("
        return f"{start}{', '.join(arguments)})"

    @functools.cached_property
    def _op_of_body(self) -> dict[int, str]:
        calls = self.program.calls.items()
        return {id(body): op for op, call in calls if (body := body_of(call)) is not None}

    def _bind_target(self, target: Any) -> str:
        run = operator_of(target).runs_as or target
        return self._bind(_symbol(target), getattr(run, "_op", run))

    def _bind(self, name: str, item: Any) -> str:
        bound = f"{name}__"
        count = 0
        while self.bindings.setdefault(bound, item) is not item:
            count += 1
            bound = f"{name}_{count}__"
        return bound

    def _argument(self, item: Any) -> str:
        if isinstance(item, Variable):
            graph = self._graphs.get(item.name)
            return item.name if graph is None else self._bind(item.name, graph)
        if isinstance(item, (list, tuple)):
            inner = ", ".join(self._argument(part) for part in item)
            return f"[{inner}]"
        if type(item) in (int, float) and item in self.sizes:
            return self.sizes[item]
        if self.sizes and isinstance(item, (SlicedBody, Kernel)):
            op = self._op_of_body[id(item)]
            self.bodies[f"{op}_body__"] = op
            return f"{op}_body__"
        plain = item is None or isinstance(item, (bool, int, str))
        if plain or (isinstance(item, float) and math.isfinite(item)):
            return repr(item)
        return self._bind("constant", item)


@functools.cache
def _symbol(target: Any) -> str:
    name = target.__name__ if isfunction(target) else str(target)
    return re.sub(r"\W", "_", name.replace("::", "_"))


def zero_values(program: Program, missing: frozenset[int]) -> frozenset[str]:
    """Find the values that are zero if no gradient comes at the positions `missing`.

    A backward is linear in the gradients that come: what depends on missing ones alone is zero, and
    a plain backward would not compute it at all. What depends on none is not, as what a group gives
    out again of the forward.
    """
    if not missing:
        return frozenset()
    tangents = {program.storage[name]: at for name, at in program.tangents.items()}
    coming = {value for value, position in tangents.items() if position not in missing}
    return frozenset(_depending(program, tangents) - _depending(program, coming))


def _depending(program: Program, values: Iterable[str]) -> set[str]:
    """Add to values of the backward all that depend on them."""
    storage, found = program.storage, set(values)

    def is_found(name: str) -> bool:
        return storage.get(name) in found

    for op in program.order:
        call = program.calls.get(op)
        if call is not None and op in program.backward_ops and any(map(is_found, call.reads)):
            found |= {storage[name] for name in results_of(call, is_found)}
    return found


def _zeros(facts: TensorFacts) -> torch.Tensor:
    tensor = torch.empty_strided(facts.shape, facts.stride, dtype=facts.dtype, device=facts.device)
    return tensor.zero_()
