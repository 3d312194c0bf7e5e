"""A group of ops as one function: run call by call, or by the code that was compiled for it."""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from remat_graph.torch.calls import Body, Call, TensorFacts, Variable, filled, is_view
from remat_graph.torch.fusing.sized_code import CodeOfSizes, Compiled, SizedCode
from remat_graph.torch.lowering import equivalence_of

__all__ = ["Kernel", "kernel_of", "results_of", "run_fused", "run_over"]

logger = logging.getLogger(__name__)


def run_fused(kernel: Kernel, *inputs: torch.Tensor) -> Any:
    """Run a kernel: what a call of a group calls."""
    return kernel.run([*map(_copied, kernel.ends, inputs)] if kernel.body.overwrites else inputs)


def run_over(kernel: Kernel, *inputs: torch.Tensor) -> Any:
    """Run a kernel that may write over those inputs that its body overwrites."""
    return kernel.run(inputs)


def _copied(ends: bool, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if ends else tensor


def results_of(call: Call, is_meant: Callable[[str], bool]) -> list[str]:
    """List the results of a call that depend on those of its variables that are meant.

    A group is looked into; any other call makes all that it makes of all that it reads.
    """
    results = call.results
    if call.target is run_fused:
        body = call.args[0].body
        pairs = zip(body.inputs, call.args[1:], strict=True)
        depending = {name for name, variable in pairs if is_meant(variable.name)}
        for inner in body.calls:
            if not depending.isdisjoint(inner.reads):
                depending.update(name for name in inner.results if name is not None)
        outputs = zip(results, body.outputs, strict=True)
        results = tuple(name for name, output in outputs if output in depending)
    return [name for name in results if name is not None]


@dataclass(eq=False)
class Kernel:
    """What a group computes, for tensors of these shapes: one for all groups that do the same.

    `body` numbers its variables, of which `facts` are known, `again` those of the other half that
    it makes again; `key` names what it computes. Inputs that the body overwrites have ended when it
    has run: their memory holds an output, or anything.
    `compiled` is the code for it; without, calls run one by one. `failure` says why there is none.
    One of a program of any size has `sized` code, for its numbers of the `symbols`.
    """

    key: str
    body: Body
    facts: Mapping[str, TensorFacts] = field(repr=False)
    again: frozenset[str] = frozenset()
    compiled: Compiled | None = field(default=None, repr=False)
    failure: str | None = field(default=None, repr=False)
    sized: SizedCode | None = field(default=None, repr=False)
    symbols: tuple[Any, ...] = field(default=(), repr=False)
    _code: CodeOfSizes | None = field(default=None, repr=False)
    _is_checked: bool = field(default=False, repr=False)

    @property
    def is_settled(self) -> bool:
        """Whether it has been compiled, or cannot be."""
        return self.compiled is not None or self.failure is not None

    @classmethod
    def of_size(cls, kernel: Kernel, sized: SizedCode, symbols: tuple[Any, ...]) -> Kernel:
        """Give the kernel that does the same as another for these numbers of its symbols.

        What nobody reads of it in most steps is made when it is read: its name, and facts.
        """
        other = object.__new__(cls)
        vars(other).update(
            body=sized.body_at(symbols), again=kernel.again, sized=sized, symbols=symbols
        )
        other.take_code_of_sizes()
        return other

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            own = vars(self)
            if name == "facts" and "sized" in own:
                own["facts"] = self.sized.facts_at(self.symbols)
            elif name == "key" and "sized" in own:
                own["key"] = _key(self.body, self.facts, self.again)
            else:
                raise AttributeError(f"{type(self).__name__} has no {name}")
            return own[name]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Kernel) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def take_code_of_sizes(self) -> bool:
        """Run by the code for any size, if it is there and holds for this one; say if that is so.

        That it gives what was planned is checked for the first size alone: what it may write over
        is copied for that.
        """
        if self.sized is not None:
            code = self._code = self.sized.code_at(self.symbols)
            if code is None:
                self.failure = self.sized.failure
            else:
                self.compiled, self._is_checked = code.at(self.symbols), code.is_checked
        return self.is_settled

    def body_at(self, _: Sequence[Any]) -> Body:
        """Give the body, in which there are no symbols."""
        return self.body

    def __repr__(self) -> str:
        return f"Kernel({self.key})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernel:
        return self

    def run(self, inputs: Collection[torch.Tensor]) -> Any:
        """Give the outputs, in the order of those of the body; inputs may be overwritten."""
        compiled = self.compiled
        if compiled is None:
            return self.interpreted(inputs)
        try:
            return compiled([*inputs]) if self._is_checked else self._checked(compiled, inputs)
        except AssertionError as error:  # by which compiled code refuses inputs, untouched
            return self._refused(str(error).partition("\n")[0], inputs)

    def _checked(self, compiled: Compiled, inputs: Collection[torch.Tensor]) -> Any:
        """See once that compiled code gives tensors as planned, in memory of their own.

        It is run on copies of what it may overwrite, and the calls run one by one if it does not.
        """
        own = [*map(_copied, self.ends, inputs)]
        pairs = zip(self.ends, own, strict=True)
        storages = {tensor.untyped_storage().data_ptr() for ends, tensor in pairs if not ends}
        outputs = compiled(own)
        for tensor, name in zip(outputs, self.body.outputs, strict=True):
            facts, storage = self.facts[name], tensor.untyped_storage().data_ptr()
            if TensorFacts.of(tensor) != facts or storage in storages:
                other = f"its {name} is {TensorFacts.of(tensor)}, or an input, not {facts}"
                return self._refused(other, inputs)
            storages.add(storage)
        self._is_checked = True
        if self._code is not None:
            self._code.is_checked = True
        return outputs

    def _refused(self, failure: str, inputs: Collection[torch.Tensor]) -> list[torch.Tensor]:
        self.failure, self.compiled = failure, None
        logger.warning("%s runs op by op: %s", self, failure)
        return self.interpreted(inputs)

    def interpreted(self, inputs: Collection[torch.Tensor]) -> list[torch.Tensor]:
        """Give the outputs by running one call after the other."""
        there: dict[str, Any] = dict(zip(self.body.inputs, inputs, strict=True))
        for call, gone in zip(self.body.calls, self._last_reads, strict=True):
            args = [filled(item, there) for item in call.args]
            kwargs = {key: filled(item, there) for key, item in call.kwargs.items()}
            output = call.target(*args, **kwargs)
            parts = output if call.sequence else [output]
            pairs = zip(call.results, parts, strict=True)
            there.update({name: part for name, part in pairs if name is not None})
            for name in gone:
                there.pop(name, None)
        return [there[name] for name in self.body.outputs]

    @cached_property
    def ends(self) -> tuple[bool, ...]:
        """Whether each input is overwritten."""
        overwritten = {read for read, _ in self.body.overwrites}
        return tuple(name in overwritten for name in self.body.inputs)

    @cached_property
    def read_as_traced(self) -> frozenset[str]:
        """The inputs that calls read which run here alone."""
        base: dict[str, str] = {}
        read = set[str]()
        for call in self.body.calls:
            if is_view(call):
                source = base.get(call.reads[0], call.reads[0])
                base.update((name, source) for name in call.results if name is not None)
            elif self.again.isdisjoint(name for name in call.results if name is not None):
                read.update(base.get(name, name) for name in call.reads)
        return frozenset(read.intersection(self.body.inputs))

    @cached_property
    def _last_reads(self) -> tuple[tuple[str, ...], ...]:
        last: dict[str, int] = {}
        for at, call in enumerate(self.body.calls):
            last.update(dict.fromkeys(call.reads, at))
        gone: list[list[str]] = [[] for _ in self.body.calls]
        for name, at in last.items():
            if name not in self.body.outputs:
                gone[at].append(name)
        return tuple(map(tuple, gone))


_lock = threading.Lock()
_kernels: weakref.WeakValueDictionary[str, Kernel] = weakref.WeakValueDictionary()


def kernel_of(body: Body, facts: Mapping[str, TensorFacts], again: Collection[str] = ()) -> Kernel:
    """Give the kernel that runs a body on tensors of these facts, the same for equal ones.

    It is for as many threads as there are now.
    """
    numbered, names = body.numbered()
    known = {number: facts[name] for name, number in names.items() if name in facts}
    remade = frozenset(number for name, number in names.items() if name in again)
    key = _key(numbered, known, remade)
    with _lock:
        return _kernels.setdefault(key, Kernel(key, numbered, known, remade))


def _key(body: Body, facts: Mapping[str, TensorFacts], again: Collection[str]) -> str:
    inputs = tuple(map(Variable, body.inputs))
    call = Call(run_fused, inputs, {}, (), sequence=True, body=body)
    layouts = [_layout(facts[name]) for name in body.outputs]
    text = f"{equivalence_of(call, facts)} {layouts} {sorted(again)} {torch.get_num_threads()}"
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _layout(facts: TensorFacts) -> tuple[Any, ...]:
    return facts.shape, facts.stride, facts.storage_bytes
