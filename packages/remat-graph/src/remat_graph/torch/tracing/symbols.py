"""Sizes of a graph as symbols, and the numbers that stand for them in one call.

TorchDynamo makes a size, or a number, that has changed a symbol. A trace has symbols of its own for
them: what torch decides on the way, as whether a size is that of another or can be divided, it
notes as conditions. Numbers for which all hold give the graph that torch would have traced with
them. Tried with torch 2.13; private names of torch's symbols are here and in `symbolic_math` alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from remat_graph.torch.errors import CaptureError
from remat_graph.torch.tracing.fakes import new_fake

__all__ = ["SYMBOLIC", "Conditions", "OtherSizes", "Symbols", "has_symbols", "new_symbol"]

_TRIES, _STEPS = 96, (1, 1, 1, -1)  # numbers near those of a call, more of them larger
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class OtherSizes(CaptureError):
    """A trace with symbols does not hold for the sizes of a call."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where the number of a symbol stands: an input, or its size or stride at a position."""

    at: int
    kind: str = ""
    dimension: int = 0

    def read(self, inputs: Sequence[Any]) -> Any:
        item = inputs[self.at]
        if not self.kind:
            return item
        numbers = item.shape if self.kind == "size" else item.stride()
        return numbers[self.dimension]


def has_symbols(example: Any) -> bool:
    """Whether an input of a graph of TorchDynamo's is a symbol, or has one among its sizes."""
    if isinstance(example, torch.Tensor):
        return any(isinstance(number, torch.SymInt) for number in _numbers_of(example))
    return isinstance(example, SYMBOLIC)


class Symbols:
    """The symbols of one trace, made of what TorchDynamo says of the inputs, its `examples`.

    `inputs` are those of the call that is traced, and `stand_ins` what to trace instead. Of its
    `names`, `sizes` are those of sizes of inputs; the others are numbers.

    Raises:
        CaptureError: if an input is of a size, or a kind, that no number of an input gives.
    """

    def __init__(self, inputs: Sequence[Any], examples: Sequence[Any]) -> None:
        self._shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.mode = FakeTensorMode(shape_env=self._shape_env)
        self._origins: dict[str, _Origin] = {}
        self._own: dict[str, Any] = {}
        self._examples = [_Described.of(example) for example in examples]
        self._constants = {
            at: item
            for at, (example, item) in enumerate(zip(examples, inputs, strict=True))
            if not isinstance(example, (torch.Tensor, *SYMBOLIC))
        }
        for at, example in enumerate(examples):
            for kind, dimension, expression in _expressions_of(example):
                if expression.is_Symbol and str(expression) not in self._origins:
                    self._origins[str(expression)] = _Origin(at, kind, dimension)
        for at, example in enumerate(examples):  # a number is one more place, where it stands
            if isinstance(example, SYMBOLIC) and example.node.expr.is_Symbol:
                self._origins[str(example.node.expr)] = _Origin(at)
        self._places: dict[str, set[tuple[str, int]]] = {}
        for example in examples:
            for kind, dimension, expression in _expressions_of(example):
                if kind and expression.is_Symbol:
                    self._places.setdefault(str(expression), set()).add((kind, dimension))
        sizes = self._places.keys()
        for name, origin in self._origins.items():
            number = origin.read(inputs)
            self._own[name] = new_symbol(self._shape_env, name, number, is_size=name in sizes)
        self.stand_ins = [
            self._stand_in(described, example, item)
            for described, example, item in zip(self._examples, examples, inputs, strict=True)
        ]
        self._names = {str(symbol.node.expr): name for name, symbol in self._own.items()}
        self.sizes = tuple(own for own, name in self._names.items() if name in sizes)
        self._conditions = Conditions(self._shape_env, tuple(self._names))

    def _stand_in(self, described: _Described, example: Any, item: Any) -> Any:
        numbers = described.numbers(self._own)
        if not isinstance(item, torch.Tensor):
            return numbers[0] if isinstance(example, SYMBOLIC) else item
        count = len(item.shape)
        fake = new_fake(self.mode, numbers[:count], numbers[count:], item.dtype, item.device)
        return fake.requires_grad_(item.requires_grad)

    def numbers(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Read off a call what each symbol of the trace stands for.

        Raises:
            OtherSizes: if the trace does not hold for the call.
        """
        read = {name: origin.read(inputs) for name, origin in self._origins.items()}
        for described, item in zip(self._examples, inputs, strict=True):
            if not described.fits(item, read):
                raise OtherSizes("an input is of a size that is not as it was expected to be")
        for at, item in self._constants.items():
            if type(inputs[at]) is not type(item) or inputs[at] != item:
                raise OtherSizes(f"an input that is no symbol is {inputs[at]!r}, not {item!r}")
        numbers = {own: read[name] for own, name in self._names.items()}
        values = tuple(numbers.values())
        if not self._conditions.are_in_range(values):
            raise OtherSizes(f"{numbers} are not all in the range that was traced")
        if not self._conditions.hold(values):
            raise OtherSizes("torch decided on sizes while it traced, and would decide otherwise")
        return numbers

    def generic(
        self,
        numbers: Mapping[str, Any],
        are_generic: Callable[[Mapping[str, Any]], bool],
        ties: Mapping[str, str],
    ) -> dict[str, Any] | None:
        """Find numbers near these for which the trace holds, and which are generic; or `None`.

        Each is another than here, so that what is read off both can be compared. What is no size
        is changed by some thousandths. Symbols in `ties` stay equal to others.
        """
        generator = random.Random(0)
        for spread in range(_TRIES):
            near = {
                name: number + (generator.choice(_STEPS) * generator.randint(1, 1 + spread // 2))
                if isinstance(number, int)
                else number + generator.uniform(1, 2) / 256
                for name, number in numbers.items()
            }
            near.update((name, near[other]) for name, other in ties.items())
            values = tuple(near.values())
            allowed = self._conditions.are_in_range(values) and self._conditions.hold(values)
            if allowed and are_generic(near):
                return near
        return None

    def ties(self, numbers: Mapping[str, Any]) -> dict[str, str]:
        """Name symbols that are the same size of several inputs, each with the first of them.

        As of words and labels, of which torch may say no more than that they are as many.
        """
        first: dict[Any, str] = {}
        ties = {}
        for name in self.sizes:
            places = frozenset(self._places.get(self._names[name], ()))
            other = first.setdefault((numbers[name], places), name)
            if other != name:
                ties[name] = other
        return ties

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the symbols of this trace, in the order of `numbers`."""
        return tuple(self._names)

    @property
    def ranges(self) -> dict[str, Any]:
        """The range of each symbol for which the trace holds, by name, as torch writes it."""
        return {str(symbol): each for symbol, each in self._shape_env.var_to_range.items()}


class Conditions:
    """What torch has noted of symbols of these names, and notes yet: read when it is asked for."""

    def __init__(self, env: ShapeEnv, names: tuple[str, ...]) -> None:
        self._env, self._names = env, names
        self._condition: Callable[..., Any] = lambda *_: ()
        self._ranges: list[tuple[int, float, float]] = []
        self._count = -1

    def are_in_range(self, numbers: Sequence[Any]) -> bool:
        """Whether numbers, in the order of the names, are each in the range of its symbol."""
        self._read()
        return all(low <= numbers[at] <= high for at, low, high in self._ranges)

    def hold(self, numbers: Sequence[Any]) -> bool:
        """Whether all that torch decided is so for these numbers; not where one divides by zero."""
        self._read()
        try:
            return all(self._condition(*numbers))
        except ZeroDivisionError:
            return False

    def _read(self) -> None:
        env = self._env
        count = len(env.guards) + len(env.replacements)
        if count == self._count:
            return
        equal = [sympy.Eq(old, new) for old, new in env.replacements.items()]
        conditions = [*(guard.expr for guard in env.guards), *equal]
        self._condition = computed(conditions, self._names)
        self._ranges = [
            (self._names.index(name), _number(allowed.lower), _number(allowed.upper))
            for symbol, allowed in env.var_to_range.items()
            if (name := str(symbol)) in self._names
        ]
        self._count = count


def new_symbol(env: ShapeEnv, name: str, number: Any, *, is_size: bool = True) -> Any:
    """Make a symbol that stands for a number: a size of a tensor, or another number.

    Raises:
        CaptureError: if it is no number.
    """
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise CaptureError(f"{name} stands for {number!r}, which is no number")
    source = ConstantSource(f"number_{name}")
    make = env.create_symbol if is_size else env.create_unspecified_symbol
    symbol = make(number, source, dynamic_dim=DimDynamic.DYNAMIC)
    if isinstance(number, float):
        return env.create_symfloatnode(symbol, hint=number, source=source)
    return env.create_symintnode(symbol, hint=number, source=source)


@dataclass(frozen=True, slots=True)
class _Described:
    """What TorchDynamo says of an input: sizes and strides, or the number that it is."""

    rank: int | None
    expressions: tuple[Any, ...]
    _compute: Callable[..., tuple[Any, ...]] | None = field(default=None)
    _names: tuple[str, ...] = ()

    @classmethod
    def of(cls, example: Any) -> _Described:
        rank = example.dim() if isinstance(example, torch.Tensor) else None
        expressions = tuple(expression for *_, expression in _expressions_of(example))
        names = tuple(sorted({str(s) for each in expressions for s in each.free_symbols}))
        if not names:
            return cls(rank, tuple(map(int, expressions)))
        return cls(rank, expressions, computed(expressions, names), names)

    def numbers(self, symbols: Mapping[str, Any]) -> tuple[Any, ...]:
        """Compute the sizes and strides, or the number, with these for the symbols."""
        if self._compute is None:
            return self.expressions
        if not symbols.keys() >= set(self._names):
            raise CaptureError(f"a size of an input is of {self._names}, which no input says")
        return self._compute(*(symbols[name] for name in self._names))

    def fits(self, item: Any, symbols: Mapping[str, Any]) -> bool:
        """Whether an input is as it was described; strides of one element do not matter."""
        if not self.expressions:
            return True
        numbers = self.numbers(symbols)
        if self.rank is None:
            return type(item) in (int, float) and numbers == (item,)
        if not isinstance(item, torch.Tensor) or tuple(item.shape) != numbers[: self.rank]:
            return False
        pairs = zip(item.shape, item.stride(), numbers[self.rank :], strict=True)
        return all(size <= 1 or stride == expected for size, stride, expected in pairs)


def _number(bound: Any) -> float:
    """Give the number that a bound of torch's is: of floats they are no integers, or infinite."""
    return int(bound) if bound.is_Integer else float(bound)


def computed(expressions: Iterable[Any], names: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """Give a function of symbols, by name, that computes expressions of them.

    Raises:
        CaptureError: if one cannot be written as Python.
    """
    try:
        body = "".join(f"{written(each)}, " for each in expressions)
        source = f"lambda {', '.join(names)}: ({body})"
        return eval(source, {"math": math, "torch": torch})  # type: ignore[no-any-return]
    except (SyntaxError, TypeError, NotImplementedError) as error:
        raise CaptureError(f"a size cannot be computed: {error}") from error


def written(expression: Any) -> str:
    """Write an expression as Python."""
    return str(PythonPrinter().doprint(expression))


def expression_of(number: Any) -> Any:
    """Give the expression of a size, which may be a number."""
    return number.node.expr if isinstance(number, SYMBOLIC) else sympy.sympify(number)


def _numbers_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*tensor.shape, *tensor.stride())


def _expressions_of(example: Any) -> list[tuple[str, int, Any]]:
    """List what is said of an input: of which kind, at which position, the expression."""
    if isinstance(example, torch.Tensor):
        kinds = ("size", example.shape), ("stride", example.stride())
        return [
            (kind, position, expression_of(number))
            for kind, numbers in kinds
            for position, number in enumerate(numbers)
        ]
    if isinstance(example, SYMBOLIC):
        return [("", 0, example.node.expr)]
    return []
