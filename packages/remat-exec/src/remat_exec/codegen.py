"""From a schedule to two Python functions: a forward, and a backward that is a generator.

The code is straight-line: one statement per step, operators bound as globals, `del` where the
schedule frees. The backward gives each group of gradients out, by `yield`, as soon as they are
final and keeps nothing of them. `emit` has the statements.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, TypeAlias

import torch

from remat_exec.autocast import lowered_bytes
from remat_exec.emit import Writer, zero_values
from remat_exec.exposed_reads import ExposedReads, exposed_reads
from remat_exec.gradient_groups import Group
from remat_exec.views import shortened
from remat_graph import (
    Compute,
    Graph,
    InvalidSchedule,
    Schedule,
    leaves,
    reads_after_leaving,
    simulate,
)
from remat_graph.torch import Program, body_of

__all__ = ["Code", "compile_source", "generate"]

_numbers = itertools.count()


_Forward: TypeAlias = (
    "Callable[[list[Any], dict[str, Any]], tuple[list[torch.Tensor], list[torch.Tensor]]]"
)
_Backward: TypeAlias = (
    "Callable[[list[Any], list[Any], dict[str, Any]], Iterator[list[torch.Tensor] | None]]"
)


@dataclass(frozen=True, eq=False)
class Text:
    """The generated functions of one schedule, for one size or for all sizes of a trace.

    `saved`, `groups`, `states` and `compared` are as `Code` says. `facts` are the names under which
    it reads what is known of a variable, with these; `bodies` what ops stand for, in slices or in
    groups.
    """

    saved: tuple[str, ...]
    groups: tuple[Group, ...]
    states: int
    compared: frozenset[str]
    source: str
    bindings: dict[str, Any] = field(repr=False)
    facts: dict[str, str] = field(repr=False)
    bodies: dict[str, str] = field(repr=False)

    @functools.cached_property
    def _compiled(self) -> CodeType:
        return _compiled(self.source, self)

    def functions(self, sizes: Mapping[str, Any]) -> tuple[_Forward, _Backward]:
        """Give the halves for some sizes, which are compiled when first asked for."""
        namespace = {**self.bindings, **sizes, "text__": self}  # which tracebacks show
        exec(self._compiled, namespace)
        return namespace["forward"], namespace["backward"]


@dataclass(frozen=True)
class Code:
    """The generated functions of one schedule.

    `forward(inputs, states)` takes the tensors of `program.inputs` and constants in order and
    returns those of `program.handed` and the tensors named `saved`. `backward(saved, tangents,
    states)` yields once with nothing, when it has taken over its arguments (lists, which it
    empties), then one list of gradients per group. The argument `states` is a dict for generator
    states by op, and checksums by variable; the field says how many of the first are kept.
    `peak_bytes` is the schedule's peak, `staying_peak_bytes` that with the gradients held that were
    to leave. Sizes that its text leaves open are `sizes`, by name, and `bodies` what ops stand
    for with these. It is compiled when first asked for: plans that are not run never are.
    """

    peak_bytes: int
    staying_peak_bytes: int
    _text: Text = field(repr=False)
    _sizes: Mapping[str, Any] = field(repr=False)
    _bodies: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, text: Text, program: Program, peak_bytes: int, staying_peak_bytes: int) -> Code:
        """Give the functions for the sizes of a program."""
        sizes: dict[str, Any] = {} if program.generic is None else dict(program.generic.numbers)
        sizes.update({bound: program.facts[name] for bound, name in text.facts.items()})
        bodies = {bound: body_of(program.calls[op]) for bound, op in text.bodies.items()}
        return cls(peak_bytes, staying_peak_bytes, text, sizes, bodies)

    def at(self, program: Program, peak_bytes: int) -> Code:
        """Give the same functions for a program of other sizes, and their peak there."""
        return self.of(self._text, program, peak_bytes, peak_bytes)

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of what is kept between the halves."""
        return self._text.saved

    @property
    def groups(self) -> tuple[Group, ...]:
        """The gradients that are given out together."""
        return self._text.groups

    @property
    def states(self) -> int:
        """How many draws have a state kept."""
        return self._text.states

    @property
    def compared(self) -> frozenset[str]:
        """The variables and the ops of which the backward compares checksums."""
        return self._text.compared

    @property
    def source(self) -> str:
        """The code, behind the sizes that it leaves open."""
        used = (name for name in self._sizes if name in self._text.source)
        sizes = "".join(f"{name} = {self._sizes[name]!r}\n" for name in used)
        return f"{sizes}\n\n{self._text.source}" if sizes else self._text.source

    @property
    def forward(self) -> _Forward:
        """The forward half."""
        return self._functions[0]

    @property
    def backward(self) -> _Backward:
        """The backward half."""
        return self._functions[1]

    @functools.cached_property
    def _functions(self) -> tuple[_Forward, _Backward]:
        return self._text.functions({**self._sizes, **self._bodies})


def generate(
    program: Program,
    graph: Graph,
    schedule: Schedule,
    *,
    save_all: bool = False,
    missing: frozenset[int] = frozenset(),
    unwanted: frozenset[str] = frozenset(),
    autocast: torch.dtype | None = None,
    noted: frozenset[str] = frozenset(),
    others: frozenset[str] | None = None,
) -> Code:
    """Generate the code of a schedule.

    No gradient comes at the positions `missing` of what the program returns: the backward leaves
    out what depends on these alone, reads zeros where it is read, and gives `None` for gradients.
    Those of the inputs `unwanted` are not given out, and what they alone need is left out, too.
    `autocast` is the type of the autocast in which the backward is called.

    With `save_all` every value alive between the halves is saved, not only what the backward of
    this schedule reads, and the generator states of all draws, so that another backward can be run
    instead. What the user is handed is not: it is for the user to keep or let go. Checksums are
    kept of what `others` compare, all that may be if that is not known. The states of the draws
    `noted` are kept in any case. Outputs that the program does not make are `None`.

    Raises:
        InvalidSchedule: if the simulator rejects the schedule, or it reads a parameter whose
            gradient has left.
    """
    generic = program.generic
    checked = None if generic is None else generic.texts.get((schedule, autocast))
    if checked is None or checked.graph is not graph:
        checked = _Checked.of(program, graph, schedule, autocast)
        if generic is not None:
            generic.texts[schedule, autocast] = checked
    shared, lowered = checked.shared, checked.lowered
    alike = schedule, save_all, missing, unwanted, autocast, noted, others, shared
    asked = *alike, frozenset(lowered)
    text = None if generic is None else generic.texts.get(asked)
    if text is None:
        own = program if generic is None else generic.program
        names = {} if generic is None else generic.names
        text = _written(
            own,
            graph,
            schedule,
            names,
            save_all=save_all,
            missing=missing,
            unwanted=unwanted,
            lowered=dict.fromkeys(lowered, autocast),
            noted=noted,
            others=others,
            shared=shared,
        )
        if generic is not None:
            generic.texts[asked] = text
    return Code.of(text, program, checked.peak_bytes, checked.staying_peak_bytes)


@dataclass(frozen=True, slots=True)
class _Checked:
    """What is known of a schedule of a graph, whatever numbers the program has that are no sizes.

    What is compared, what an autocast takes beside by op, and both peaks, as in `Code`.
    """

    graph: Graph
    shared: ExposedReads
    lowered: dict[str, int]
    peak_bytes: int
    staying_peak_bytes: int

    @classmethod
    def of(
        cls, program: Program, graph: Graph, schedule: Schedule, autocast: torch.dtype | None
    ) -> _Checked:
        """Check a schedule, as `generate` says."""
        held = simulate(graph, schedule).during_bytes
        late = reads_after_leaving(graph, schedule)
        if late is not None:
            raise InvalidSchedule(
                f"computes {late[0]!r} with {late[1]!r} after that, or its gradient, has left"
            )
        lowered = {} if autocast is None else lowered_bytes(program, autocast)
        return cls(
            graph,
            exposed_reads(program),
            lowered,
            _peak(schedule, held, lowered),
            _peak(schedule, _with_staying(graph, schedule, held), lowered),
        )


def _written(
    program: Program,
    graph: Graph,
    schedule: Schedule,
    sizes: Mapping[float, str],
    *,
    save_all: bool,
    missing: frozenset[int],
    unwanted: frozenset[str],
    lowered: dict[str, torch.dtype | None],
    noted: frozenset[str],
    others: frozenset[str] | None,
    shared: ExposedReads,
) -> Text:
    """Write the code of a schedule, with names for the numbers `sizes`."""
    loss = next(i for i, s in enumerate(schedule.steps) if s == Compute("loss"))
    replayed = _draws(program) if save_all else _replayed_draws(program, schedule) | noted
    shorter = shortened(program)
    forward = Writer(program, replayed, {}, shorter, sizes=sizes)
    again = shared.ops & _run_again(schedule)

    def may_compare(name: str) -> bool:
        """Whether another backward may compare an input, or the results of an op."""
        return save_all and (others is None or name in others)

    forward.compared = again.union(filter(may_compare, shared.ops))
    forward.receive(forward.inputs)
    forward.run(schedule.steps[:loss])
    available = forward.inputs_and_views
    kept = [name for name in forward.live if name not in available]

    forward.make(name for p, name in enumerate(program.handed) if p not in program.deferred)

    backward = Writer(program, replayed, forward.bindings, shorter, forward.computed, sizes=sizes)
    backward.compared = forward.compared
    backward.available((*forward.inputs, *kept))
    handed = {program.storage[name] for name in program.held}
    if save_all:
        backward.receive(name for name in kept if program.storage[name] not in handed)
    tangents = tuple(t for t, position in program.tangents.items() if position not in missing)
    backward.receive(tangents)
    backward.zero = zero_values(program, missing)
    backward.lowered = lowered
    groups = backward.run_backward(graph, schedule.steps[loss + 1 :], unwanted)
    saved = [name for name in forward.inputs if name in backward.read_at_entry]
    saved += [
        name
        for name in kept
        if name in backward.read_at_entry or (save_all and program.storage[name] not in handed)
    ]
    read = [name for name in (*forward.inputs, *kept) if name in backward.read_at_entry]
    compared = [name for name in read if program.storage.get(name) in shared.values]
    opening, closing = (Writer(program, replayed, forward.bindings, shorter) for _ in range(2))
    opening.compare(compared, again=True)
    # What is nobody's to train may be written to by others while the backward runs, as a loader's
    # buffer; it is there to the end.
    data = [name for name in compared if name in forward.inputs and name not in program.gradients]
    closing.compare(data, again=True)
    last = max((i for i, line in enumerate(backward.lines) if line == "yield given"), default=0)
    backward.lines[last:last] = closing.lines
    exposed = (name for name in forward.inputs if program.storage.get(name) in shared.values)
    forward.compare(dict.fromkeys((*compared, *filter(may_compare, exposed))), again=False)

    source = "\n".join(
        [
            "def forward(inputs, states):",
            f"    {_unpack(forward.inputs, 'inputs')}",
            "    inputs.clear()",
            *(f"    {line}" for line in forward.lines),
            f"    return [{', '.join(_handed(program))}], [{', '.join(saved)}]",
            "",
            "",
            "def backward(saved, tangents, states):",
            f"    {_unpack(saved, 'saved')}",
            f"    {_unpack(tangents, 'tangents')}",
            "    saved.clear()",
            "    tangents.clear()",
            *(f"    {line}" for line in opening.lines),
            "    yield None",
            *(f"    {line}" for line in backward.lines),
            "",
        ]
    )
    return Text(
        tuple(saved), groups, len(replayed), again.union(compared), source, forward.bindings,
        {**forward.facts, **backward.facts}, {**forward.bodies, **backward.bodies},
    )  # fmt: skip


def compile_source(source: str, bindings: dict[str, Any]) -> Any:
    """Compile the function `make`, whose lines tracebacks show as long as it lives."""
    namespace = dict(bindings)
    shown = _Shown()
    exec(_compiled(source, shown), namespace)
    namespace["shown__"] = shown
    return namespace["make"]


class _Shown:
    """Lives as long as the lines of a source are shown."""


def _compiled(source: str, owner: Any) -> CodeType:
    """Compile a source, whose lines tracebacks show as long as its owner lives."""
    filename = f"<remat plan {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(owner, linecache.cache.pop, filename, None)
    return compile(source, filename, "exec")


def _unpack(names: Iterable[str], source: str) -> str:
    listed = ", ".join(names)
    return f"[{listed}] = {source}" if listed else f"assert not {source}"


def _handed(program: Program) -> Iterator[str]:
    for position, name in enumerate(program.handed):
        yield "None" if position in program.deferred else name


def _draws(program: Program) -> set[str]:
    return {op for op, call in program.calls.items() if call.random is not None}


def _replayed_draws(program: Program, schedule: Schedule) -> set[str]:
    """Find the drawing ops that a schedule computes more than once."""
    return _draws(program) & _run_again(schedule)


def _run_again(schedule: Schedule) -> set[str]:
    """Find the ops that a schedule computes more than once."""
    count = Counter(step.op for step in schedule.steps if isinstance(step, Compute))
    return {op for op, times in count.items() if times > 1}


def _with_staying(graph: Graph, schedule: Schedule, held: Sequence[int]) -> list[int]:
    """Give what is held at each step if nobody lets go of the gradients that were to leave."""
    most, staying = [], 0
    for step, size in zip(schedule.steps, held, strict=True):
        most.append(size + staying)
        if isinstance(step, Compute) and leaves(step.op):
            inputs = set(graph.ops[graph.op_index[step.op]].inputs) - graph.resident
            staying += sum(graph.value_by_name[value].size_bytes for value in inputs)
    return most


def _peak(schedule: Schedule, held: Sequence[int], lowered: dict[str, int]) -> int:
    """Give the peak of a schedule; what is `lowered` takes so many bytes more."""
    return max(
        size + (lowered.get(step.op, 0) if isinstance(step, Compute) else 0)
        for size, step in zip(held, schedule.steps, strict=True)
    )
