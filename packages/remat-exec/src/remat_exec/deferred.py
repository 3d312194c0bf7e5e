"""Tensors that are made when they are read.

A `DeferredTensor` has a shape, a type and a place in autograd's graph, but no data until an
operator or Python asks for it. Views, casts and copies of one are such tensors, too. Once it is
made it stands for an ordinary tensor: what is computed of it is one. It is made below autograd, so
a gradient of it goes where that of the tensor it stands for would go.

It has no memory of its own until it is set as the `.data` of another tensor: torch takes the memory
then, without an operator, so it gets that of the tensor it stands for.

Limits: operators that change its own shape in place are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Self
from weakref import WeakSet

import torch
from torch.utils import _pytree as pytree

from remat_exec.errors import ExecutionError

__all__ = ["DeferredTensor", "watched"]

aten = torch.ops.aten

_COPIES = frozenset({aten.clone.default, aten._to_copy.default})
_VIEWS = frozenset({aten._unsafe_view.default})  # whose schema does not say so
_WHERE = frozenset({"device", "pin_memory", "non_blocking", "layout"})
_OF_SHAPE = frozenset({aten.set_, aten.resize_, aten.resize_as_})

_Tensor = torch.Tensor
_IN_PLACE = frozenset({_Tensor.apply_, _Tensor.map_, _Tensor.map2_})  # by Python, on memory
# What looks at memory without an operator, so that it cannot be seen by dispatch.
_OF_DATA = frozenset(
    {
        *_IN_PLACE,
        _Tensor.__array__,
        _Tensor.__deepcopy__,
        _Tensor.__dlpack__,
        _Tensor.__format__,
        _Tensor.__reduce_ex__,
        _Tensor.__repr__,
        _Tensor._typed_storage,
        _Tensor.data_ptr,
        _Tensor.is_shared,
        _Tensor.numpy,
        _Tensor.share_memory_,
        _Tensor.storage,
        _Tensor.tolist,
        _Tensor.untyped_storage,
        _Tensor.__cuda_array_interface__.__get__,
    }
)
_SET_DATA = _Tensor.data.__set__  # type: ignore[attr-defined]


class _Memory:
    """Memory that a tensor and its views share: whether it is there, and copies that wait for it.

    Once it is there, it can be changed by what is no `DeferredTensor`: a view, or an array of
    numpy. So no copy waits any longer then.
    """

    def __init__(self) -> None:
        self.is_there = False
        self.copies: WeakSet[DeferredTensor] = WeakSet()


class DeferredTensor(torch.Tensor):
    """A tensor that is made when it is read.

    `_make` makes it, of `_source` if it is a view or a copy of one.
    """

    _make: Callable[[], torch.Tensor]
    _source: DeferredTensor | None
    _value: torch.Tensor | None
    _memory: _Memory

    @classmethod
    def like(
        cls,
        meta: torch.Tensor,
        device: torch.device,
        make: Callable[[], torch.Tensor],
        source: DeferredTensor | None = None,
        memory: _Memory | None = None,
    ) -> Self:
        """Stand for a tensor of the sizes, strides and type of `meta`.

        It is a view of a `source` if it is given that one's `memory`, else a copy of it.
        """
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        made._make, made._source, made._value = make, source, None
        made._memory = memory or _Memory()
        return made

    @property
    def made(self) -> torch.Tensor:
        """The tensor that this stands for, made if it is not there."""
        made: torch.Tensor = self._be_made()
        return made

    @property
    def origin(self) -> DeferredTensor:
        """The output that this is a view or a copy of, or this, as long as it is not made."""
        origin = self
        while origin._source is not None:
            origin = origin._source
        return origin

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _be_made(self) -> torch.Tensor:
        if self._source is not None:
            _ = self._source.made  # which makes this one, if it is a copy that waits
        if self._value is None:
            self._value, self._source = self._make(), None
            self._make = _nothing
            self._memory.is_there = True
            while self._memory.copies:
                _ = self._memory.copies.pop().made
        return self._value

    def _of_python(self) -> torch.Tensor:
        """Give what Python is to look at: it says whether it needs a gradient, as this does."""
        return self.made.detach().requires_grad_(self.requires_grad)

    def _take_memory(self) -> None:
        """Have the memory of what this stands for, as torch is to take it from here.

        Raises:
            ExecutionError: if memory does not say what is there: a conjugate, or a negative.
        """
        made = self.made
        if made.is_conj() or made.is_neg():
            raise ExecutionError(
                "a conjugate of an output that is made when it is read cannot be the .data of "
                "another tensor; use a clone()"
            )
        with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
            aten.set_.source_Storage_storage_offset(
                self, made.untyped_storage(), made.storage_offset(), made.size(), made.stride()
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy the tensor that this stands for, where a tensor can be copied.

        Raises:
            RuntimeError: if it is no leaf, as torch does.
        """
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment: detach() it first"
            )
        copied: torch.Tensor = copy.deepcopy(self._of_python(), memo)
        return copied

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch; one that looks at memory gets the tensor that this stands for.

        Raises:
            ExecutionError: if `.data` is set.
        """
        if func == _SET_DATA:
            raise ExecutionError(
                "the .data of an output that is made when it is read cannot be set; use a clone()"
            )
        given = args[0] if func in _IN_PLACE else None
        if func in _OF_DATA:
            args, kwargs = pytree.tree_map_only(
                DeferredTensor, DeferredTensor._of_python, (args, kwargs)
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result if given is None else given

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on what is made for it; one that views or copies can wait.

        Raises:
            ExecutionError: if it would change the shape in place.
        """
        given = kwargs or {}
        if torch.Tag.inplace_view in func.tags or func.overloadpacket in _OF_SHAPE:
            raise ExecutionError(
                f"{func} changes the shape of an output that is made when it is read; call it on "
                f"a clone()"
            )
        source = args[0] if args else None
        if isinstance(source, DeferredTensor) and _can_wait(source, func, given):
            with torch.inference_mode(mode=False):  # what it stands for is no inference tensor
                waiting = _later(source, func, args, given)
            if waiting is not None:
                return waiting
        changed = {id(item.made): item for item in _changed(func, args, given)}
        args, given = pytree.tree_map_only(DeferredTensor, lambda one: one.made, (args, given))
        result = func(*args, **given)
        return changed.get(id(result), result)


_library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "_has_compatible_shallow_copy_type", "PythonTLSSnapshot")
def _has_compatible_shallow_copy_type(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Say whether a tensor can take the memory of another, which one that waits gets here.

    Torch asks this before it sets `.data`, of tensors that have a `__torch_dispatch__`.
    """
    if isinstance(source, DeferredTensor):
        source._take_memory()
    with torch._C._DisableTorchDispatch():
        same: bool = aten._has_compatible_shallow_copy_type.default(tensor, source)
    return same


def watched(tensor: torch.Tensor, read: Callable[[], None]) -> DeferredTensor:
    """Stand for a tensor that is there, to see when it is `read`."""

    def make() -> torch.Tensor:
        read()
        return tensor

    return DeferredTensor.like(tensor, tensor.device, make)


def _nothing() -> torch.Tensor:
    raise AssertionError("made twice; please report it")


def _can_wait(source: DeferredTensor, func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator gives a view, or a copy on the same device, of what is not there."""
    if source._value is not None:
        return False
    if func in _COPIES:
        return not (source._memory.is_there or any(kwargs.get(name) for name in _WHERE))
    if func in _VIEWS:
        return True
    returns = func._schema.returns
    return bool(returns) and all(
        item.alias_info is not None and not item.alias_info.is_write for item in returns
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _later(source: DeferredTensor, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give what an operator gives, to be made when it is read; nothing for an element.

    Who takes an element reads it, and `torch.tensor` does so without an operator.
    """
    rest = args[1:]
    meta = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta")
    if source.storage_offset():
        meta = torch.empty(0, dtype=source.dtype, device="meta").set_(
            torch.empty(_span(source), dtype=source.dtype, device="meta").untyped_storage(),
            source.storage_offset(), source.size(), source.stride(),
        )  # fmt: skip
    like = func(meta, *rest, **kwargs)
    if source.dim() and any(not one.dim() for one in pytree.tree_leaves(like)):
        return None
    memory = None if func in _COPIES else source._memory

    def later(one: torch.Tensor, at: int | None) -> DeferredTensor:
        def make() -> torch.Tensor:
            with torch.no_grad():
                result = func(source.made, *rest, **kwargs)
            part: torch.Tensor = result if at is None else result[at]
            return part

        return DeferredTensor.like(one, source.device, make, source, memory)

    if isinstance(like, torch.Tensor):
        result = later(like, None)
        if func in _COPIES:
            source._memory.copies.add(result)
        return result
    return [later(one, at) for at, one in enumerate(like)]


def _span(tensor: torch.Tensor) -> int:
    """Count the elements of memory up to the last of a tensor."""
    pairs = zip(tensor.size(), tensor.stride(), strict=True)
    return int(tensor.storage_offset() + sum((size - 1) * step for size, step in pairs) + 1)


def _changed(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[DeferredTensor]:
    """List the arguments that an operator writes to."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from (
                item for item in pytree.tree_leaves(value) if isinstance(item, DeferredTensor)
            )
