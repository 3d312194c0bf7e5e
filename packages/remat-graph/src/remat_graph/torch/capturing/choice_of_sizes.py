"""The ways that were chosen for the program of one size, for those of other sizes of its trace.

Each program is written anew as chosen, with its own numbers: the same stretches in as many slices,
the same layouts and alternatives. So is the program of sizes that all differ, for which code is
written: that code is a size's if both programs are the same call by call, but for the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from remat_graph.torch.calls import Call, TensorFacts
from remat_graph.torch.fusing.kernel import Kernel
from remat_graph.torch.program import Generic, Program
from remat_graph.torch.ways.choice import Choice
from remat_graph.torch.ways.cuts import Cut
from remat_graph.torch.ways.resizing import Resizer
from remat_graph.torch.ways.slice_by_slice import SlicedBody

__all__ = ["ChoiceOfSizes", "Cuts"]

Cuts = tuple[tuple[Cut, ...], ...]


@dataclass(frozen=True)
class ChoiceOfSizes:
    """A choice for the program of one size, which has these cuts; `order` is that of its ops."""

    choice: Choice
    cuts: Cuts
    order: tuple[str, ...]

    def of(self, plain: Program) -> tuple[Program, Cuts] | None:
        """Write the program of other sizes as chosen, and give the cuts that it is written with.

        `None` where rules do not allow this for its sizes, or another program comes of it.
        """
        written = self._written(plain)
        generic = None if plain.generic is None else self._generic(plain.generic)
        if written is None or generic is None or plain.generic is None:
            return written
        program, cuts = written
        own = plain.generic
        if self._is_alike(generic, program, own):
            for_all = Generic(generic, own.names, own.formulas, own.numbers, self._texts)
            object.__setattr__(program, "generic", for_all)
        return program, cuts

    def allows(self, plain: Program) -> bool:
        """Whether rules allow it for the sizes of a program."""
        return self._resized(self.choice.prepare(plain)) is not None

    def _is_alike(self, generic: Program, program: Program, own: Generic) -> bool:
        """Whether code that is written for the program of all sizes is that of one of these."""
        return _is_alike(
            generic, program, {size: own.numbers[name] for size, name in own.names.items()}
        )

    def _written(self, plain: Program) -> tuple[Program, Cuts] | None:
        prepared = self.choice.prepare(plain)
        cuts = self._resized(prepared)
        if cuts is None:
            return None
        program = self.choice.of(prepared, cuts)
        return (program, cuts) if program.order == self.order else None

    def _resized(self, prepared: Program) -> Cuts | None:
        """Give the cuts that are chosen; of other kinds none."""
        resizer = Resizer(prepared)
        slices_of = dict(self.choice.sliced)
        cuts: list[tuple[Cut, ...]] = []
        for kind, of_kind in enumerate(self.cuts):
            slices = slices_of.get(kind)
            resized = [resizer.resized(cut) for cut in of_kind if slices is not None]
            there = tuple(cut for cut in resized if cut is not None)
            if slices is not None and any(
                min(slices, cut.units) != min(slices, other.units)
                for cut, other in zip(of_kind, there, strict=False)
            ):
                return None
            if len(there) < len(resized):
                return None
            cuts.append(there)
        return tuple(cuts)

    def _generic(self, own: Generic) -> Program | None:
        """Write the program of sizes that all differ, which is one for all sizes."""
        if "written" not in self._of_all:
            written = self._written(own.program)
            self._of_all["written"] = None if written is None else written[0]
        return self._of_all["written"]

    @cached_property
    def _of_all(self) -> dict[str, Program | None]:
        return {}

    @cached_property
    def _texts(self) -> dict[Any, Any]:
        return {}


def _is_alike(generic: Program, program: Program, sizes: Mapping[float, Any]) -> bool:
    """Whether code that is written for one program, with names for its `sizes`, is the other's."""
    fields = (
        "inputs", "writes", "order", "storage", "returned", "handed", "tangents", "gradients",
        "backward_ops", "alternatives", "overwrites", "deferred", "leaving",
    )  # fmt: skip
    if not all(getattr(generic, name) == getattr(program, name) for name in fields):
        return False
    viewed = {name: generic.facts[name] for name in _viewed(generic)}
    return (
        _are_same(viewed, program.facts, sizes, _same_facts)
        and _are_same(generic.calls, program.calls, sizes, _same_call)
        and _are_same(generic.views, program.views, sizes, _same_call)
    )


def _viewed(program: Program) -> set[str]:
    """Name the views and what they are of: of these alone, code says what is known of them."""
    reads = (name for call in program.views.values() for name in call.reads)
    return {*program.views, *reads}.intersection(program.facts)


def _are_same(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    sizes: Mapping[float, Any],
    same: Callable[[Any, Any, Mapping[float, Any]], bool],
) -> bool:
    """Whether all of one is the same in the other; what one object is in both is of no size."""
    return one.keys() <= other.keys() and all(
        item is other[name] or same(item, other[name], sizes) for name, item in one.items()
    )


def _same_facts(one: TensorFacts, other: TensorFacts, sizes: Mapping[float, Any]) -> bool:
    return (one.dtype, one.device) == (other.dtype, other.device) and _same(
        (one.shape, one.stride, one.offset), (other.shape, other.stride, other.offset), sizes
    )


def _same_call(one: Call, other: Call, sizes: Mapping[float, Any]) -> bool:
    return (
        one.target is other.target
        and (one.results, one.sequence, one.random) == (other.results, other.sequence, other.random)
        and _same((one.args, dict(one.kwargs)), (other.args, dict(other.kwargs)), sizes)
        and (one.replay is None) == (other.replay is None)
        and (
            one.replay is None
            or other.replay is None
            or _same_call(one.replay, other.replay, sizes)
        )
    )


def _same(one: Any, other: Any, sizes: Mapping[float, Any]) -> bool:
    """Whether code that is written for one argument, with names for `sizes`, is the other's.

    Bodies are read off the program that runs.
    """
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        pairs: Sequence[tuple[Any, Any]] = tuple(zip(one, other, strict=False))
        return len(one) == len(other) and all(_same(a, b, sizes) for a, b in pairs)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k], sizes) for k in one)
    if isinstance(one, (SlicedBody, Kernel)):
        return type(one) is type(other)
    if type(one) in (int, float):
        named = sizes.get(one, one)
        return type(named) is type(other) and bool(named == other)
    return type(one) is type(other) and (one is other or bool(one == other))
