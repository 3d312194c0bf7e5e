"""What a forward does, noted operator by operator on fake tensors, with the calls of its blocks.

Of each operator the notes hold what is the same where blocks do the same (its arguments but for
which tensors they are, module and source line, whether gradients are on), and apart from it where
the tensors that it reads come from: an input, an operator before, or neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from remat_graph.errors import RematError
from remat_graph.torch.repeats.fake_outputs import FakeOutputs, looks_of
from remat_graph.torch.tracing.aot import is_custom_backward, saves_through_hooks
from remat_graph.torch.tracing.fakes import storage_key
from remat_graph.torch.tracing.joint import Key
from remat_graph.torch.tracing.provenance import noted_now
from remat_graph.torch.tracing.structure import Structure, flatten

__all__ = [
    "Block",
    "Inputs",
    "Notes",
    "Read",
    "RepeatsUnclear",
    "Run",
    "forwards_replaced",
    "note_forward",
]

_DEVICE = torch.ops.prim.device.default

Inputs: TypeAlias = "Mapping[str, tuple[Key, torch.Tensor]]"
Run: TypeAlias = "Callable[[Mapping[str, torch.Tensor], TorchDispatchMode], list[torch.Tensor]]"
Read: TypeAlias = "tuple[Any, ...]"  # ("given", key), ("made", call, output) or ("found", count)


class RepeatsUnclear(RematError):
    """Notes do not say which blocks do the same, and why; all of them are traced then."""


@dataclass(slots=True)
class Block:
    """A call of a block: its operators are `first` to before `end`."""

    name: str
    first: int
    end: int = 0
    taken: tuple[Read, ...] = ()
    returned: tuple[Read, ...] = ()
    structure: Structure | None = None

    @property
    def calls(self) -> range:
        """The operators that ran within."""
        return range(self.first, self.end)


@dataclass(frozen=True, slots=True)
class Notes:
    """What a forward did: operators, what each read, the calls of blocks, and what it returned."""

    operators: list[Any]
    reads: list[tuple[Read, ...]]
    blocks: list[Block]
    returned: tuple[Read, ...]


def note_forward(
    module: torch.nn.Module,
    names: Sequence[str],
    run: Run,
    inputs: Inputs,
    watch: Callable[[Notes], None] = lambda notes: None,
) -> Notes:
    """Run a forward, and note what it does; `names` are those of its blocks.

    After each call of a block `watch` sees the notes so far, and may raise to end it.

    Raises:
        RepeatsUnclear: if a tensor has a hook, which would run in the backward.
    """
    recorder = _Recorder(watch)
    for key, tensor in inputs.values():
        recorder.know(tensor, ("given", key))
    blocks = ((name, module.get_submodule(name)) for name in names)
    with forwards_replaced(
        (block, _Noting(recorder, name, block.forward)) for name, block in blocks
    ):
        returned = run({name: tensor for name, (_, tensor) in inputs.items()}, recorder)
    return recorder.finish(returned)


@contextmanager
def forwards_replaced(
    forwards: Iterator[tuple[torch.nn.Module, Callable[..., Any]]],
) -> Iterator[None]:
    """Let modules have other forwards."""
    before: list[tuple[dict[str, Any], Any]] = []
    try:
        for block, forward in forwards:
            before.append((block.__dict__, block.__dict__.get("forward")))
            block.__dict__["forward"] = forward
        yield
    finally:
        for state, own in before:
            state.pop("forward", None)
            if own is not None:
                state["forward"] = own


class _Noting:
    """The forward of a block, whose call is noted.

    It has slots, for else the notes would be found on the module and put back (`restoring`).
    """

    __slots__ = ("_forward", "_name", "_recorder")

    def __init__(self, recorder: _Recorder, name: str, forward: Callable[..., Any]) -> None:
        self._recorder, self._name, self._forward = recorder, name, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        if recorder.within is not None:
            return self._forward(*args, **kwargs)
        notes = recorder.notes
        recorder.within, recorder.began = self._name, len(notes.operators)
        block = Block(self._name, recorder.began)
        block.taken = recorder.reads_of(flatten((args, kwargs))[0])
        result = self._forward(*args, **kwargs)
        tensors, block.structure = flatten(result)
        block.returned = recorder.reads_of(tensors)
        block.end = len(notes.operators)
        notes.blocks.append(block)
        recorder.within = None
        recorder.watch(notes)
        return result


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operator that runs, and which tensors it reads."""

    def __init__(self, watch: Callable[[Notes], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch
        self.notes = Notes([], [], [], ())
        self.within: str | None = None
        self.began = 0
        self._found = 0
        self._outputs = FakeOutputs()
        self._known: dict[int, Read] = {}
        self._held: list[torch.Tensor] = []  # so that no other tensor gets the same id
        self._stored: dict[int, int] = {}  # after how many operators a storage was first seen

    def know(self, tensor: torch.Tensor, read: Read) -> None:
        """Note where a tensor comes from, unless it is known."""
        if id(tensor) in self._known:
            return
        self._known[id(tensor)] = read
        self._held.append(tensor)
        self._stored.setdefault(storage_key(tensor), len(self.notes.operators))

    def reads_of(self, tensors: Sequence[torch.Tensor]) -> tuple[Read, ...]:
        """Give the places that tensors come from."""
        return tuple([self._read_of(tensor) for tensor in tensors])

    def finish(self, returned: Sequence[torch.Tensor]) -> Notes:
        """Give the notes of a forward that returned these."""
        if any(tensor._backward_hooks for tensor in self._held):
            raise RepeatsUnclear("a tensor has a hook")
        notes = self.notes
        return Notes(notes.operators, notes.reads, notes.blocks, self.reads_of(returned))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        if func is _DEVICE and type(args[0]) is FakeTensor:  # asked again and again by operators
            return args[0].device
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        words: list[Any] = [func, torch.is_grad_enabled()]
        tensors: list[torch.Tensor] = []
        self._tell(args, words, tensors)
        if kwargs:
            self._tell(kwargs, words, tensors)
        reads, key = self.reads_of(tensors), tuple(words)
        part, source = noted_now()
        if self.within is not None:
            part = part.removeprefix(self.within)
            if saves_through_hooks() or self._writes_outside(func, args, kwargs):
                words.append(self.within)  # like no other block
        words += part, source
        result = self._outputs.run(func, key, tensors, lambda: func(*args, **kwargs))
        call = len(self.notes.operators)
        self.notes.operators.append(words)
        self.notes.reads.append(reads)
        results = (result,) if isinstance(result, torch.Tensor) else pytree.tree_leaves(result)
        for output, item in enumerate(results):
            if isinstance(item, torch.Tensor):
                self.know(item, ("made", call, output))
        return result

    def _tell(self, item: Any, words: list[Any], tensors: list[torch.Tensor]) -> None:
        """Note what an argument is, and which tensors it has."""
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            maker = type(item.grad_fn)
            words += looks_of(item), item.requires_grad, maker
            if is_custom_backward(maker):  # nobody sees what it does
                words.append(self.within)
        elif isinstance(item, dict):
            words += dict, tuple(item)
            for part in item.values():
                self._tell(part, words, tensors)
        elif isinstance(item, (tuple, list)):
            words += type(item), len(item)
            for part in item:
                self._tell(part, words, tensors)
        else:
            words += type(item), item

    def _read_of(self, tensor: torch.Tensor) -> Read:
        read = self._known.get(id(tensor))
        if read is None:
            read = ("found", self._found)
            self.know(tensor, read)
            self._found += 1
        return read

    def _writes_outside(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether an operator writes to what was there before the block."""
        if not func._schema.is_mutable:
            return False
        written = [
            args[position] if position < len(args) else kwargs.get(argument.name)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return any(
            self._stored[storage_key(tensor)] < self.began
            for tensor in pytree.tree_leaves(written)
            if isinstance(tensor, torch.Tensor)
        )
