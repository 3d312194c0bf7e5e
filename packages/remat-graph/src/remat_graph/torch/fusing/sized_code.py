"""Compiled code for groups of any size: what a group computes, with symbols for its sizes.

A group of a program of sizes that all differ is that of every size of its trace, with other numbers
in their places. It is compiled once, with symbols; what the compiler decides on sizes, as that one
is not that of another, it notes as conditions, which a size must meet to run this code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch

from remat_graph.torch.calls import Body, Call, TensorFacts, Variable, at_numbers, spanned_bytes
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.lowering import equivalence_of

__all__ = ["CodeOfSizes", "Compiled", "SizedCode", "facts_at"]

Compiled = Callable[[list[Any]], Any]
"""Takes a list of tensors, which it empties; gives a sequence of tensors."""

_MOST_CODES = 4  # for sizes of one group


@dataclass(eq=False)
class CodeOfSizes:
    """Code for those sizes for which what was decided `holds`; it takes symbols before tensors.

    It `is_checked` once it has given what was planned for one of them.
    """

    run: Compiled
    holds: Callable[[Sequence[Any]], bool]
    is_checked: bool = False

    def at(self, symbols: Sequence[Any]) -> Compiled:
        """Give the code for these numbers of the symbols."""
        return lambda tensors: self.run([*symbols, *tensors])


@dataclass(eq=False)
class SizedCode:
    """What groups compute that differ in sizes alone.

    `body` and `facts` have numbers in the places of sizes: those of `formulas`, which say what each
    is of the `symbols`, a Python expression. No other number in them is equal to one of these.
    `codes` are few: compilers tell large sizes from small ones. `failure` says why there is none.
    """

    body: Body
    facts: Mapping[str, TensorFacts] = field(repr=False)
    formulas: Mapping[int, str]
    symbols: Mapping[str, int]
    codes: list[CodeOfSizes] = field(default_factory=list, repr=False)
    failure: str | None = None

    @classmethod
    def of(
        cls,
        body: Body,
        facts: Mapping[str, TensorFacts],
        names: Mapping[float, str],
        formulas: Mapping[str, str],
        numbers: Mapping[str, Any],
    ) -> Self | None:
        """Read it off a group in which these `names` stand for sizes; `None` if none does.

        `formulas` say what each is of those that are symbols, and `numbers` what these are.

        Raises:
            CaptureError: if one of them is no size.
        """
        there = {number for number in _numbers(body, facts) if number in names}
        if not there:
            return None
        if any(isinstance(number, float) or names[number] not in formulas for number in there):
            raise CaptureError("a group reads a number that is no size")
        own = {int(number): formulas[names[number]] for number in sorted(there)}
        used = set[str]().union(*(compile(each, "", "eval").co_names for each in own.values()))
        return cls(
            body, facts, own, {name: numbers[name] for name in sorted(used & numbers.keys())}
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what is to be compiled; code stays where it was loaded."""
        return SizedCode, (self.body, dict(self.facts), self.formulas, self.symbols)

    @property
    def may_have_more(self) -> bool:
        """Whether code for other sizes than it has may be compiled."""
        return self.failure is None and len(self.codes) < _MOST_CODES

    def code_at(self, symbols: Sequence[Any]) -> CodeOfSizes | None:
        """Give the code for these numbers of the symbols; `None` if there is none for them."""
        return next((code for code in self.codes if code.holds(symbols)), None)

    @cached_property
    def key(self) -> str:
        """A name for what it computes, whatever numbers stand for the sizes."""
        named: dict[float, str] = {number: f"<{text}>" for number, text in self.formulas.items()}
        calls = tuple(at_numbers(call, named) for call in self.body.calls)
        layouts = {
            name: dataclasses.replace(
                fact, shape=at_numbers(fact.shape, named), stride=at_numbers(fact.stride, named)
            )
            for name, fact in self.facts.items()
        }
        body = dataclasses.replace(self.body, calls=calls)
        inputs = tuple(map(Variable, body.inputs))
        call = Call(torch.empty, inputs, {}, (), sequence=True, body=body)
        given = [(layouts[name].shape, layouts[name].stride) for name in body.outputs]
        text = f"{equivalence_of(call, layouts)} {given} {torch.get_num_threads()}"
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    @cached_property
    def _compute(self) -> Callable[..., tuple[Any, ...]]:
        formulas = "".join(f"{text}, " for text in self.formulas.values())
        source = f"lambda {', '.join(self.symbols)}: ({formulas})"
        return eval(source, {"math": math, "torch": torch})  # type: ignore[no-any-return]

    def body_at(self, symbols: Sequence[Any]) -> Body:
        """Give the body for these numbers of the symbols."""
        numbers = self._numbers(symbols)
        calls = tuple(at_numbers(call, numbers) for call in self.body.calls)
        return dataclasses.replace(self.body, calls=calls)

    def facts_at(self, symbols: Sequence[Any]) -> dict[str, TensorFacts]:
        """Say what is known of its variables for these numbers of the symbols."""
        numbers = self._numbers(symbols)
        return {name: facts_at(fact, numbers) for name, fact in self.facts.items()}

    def _numbers(self, symbols: Sequence[Any]) -> dict[float, Any]:
        return dict(zip(self.formulas, self._compute(*symbols), strict=True))


def facts_at(facts: TensorFacts, numbers: Mapping[float, Any]) -> TensorFacts:
    """Say what is known of a tensor, alone in its memory, where other numbers are its sizes."""
    shape, stride, offset = at_numbers((facts.shape, facts.stride, facts.offset), numbers)
    size_bytes = spanned_bytes(shape, stride, offset, facts.dtype)
    return TensorFacts(shape, stride, offset, facts.dtype, facts.device, size_bytes)


def _numbers_in(item: Any) -> Iterator[float]:
    """Yield the numbers in the arguments of a call."""
    if isinstance(item, (tuple, list)):
        for part in item:
            yield from _numbers_in(part)
    elif isinstance(item, dict):
        yield from _numbers_in(list(item.values()))
    elif type(item) in (int, float):
        yield item


def _numbers(body: Body, facts: Mapping[str, TensorFacts]) -> Iterator[float]:
    for call in body.calls:
        yield from _numbers_in((call.args, dict(call.kwargs)))
    for each in facts.values():
        yield from _numbers_in((each.shape, each.stride, each.offset))
