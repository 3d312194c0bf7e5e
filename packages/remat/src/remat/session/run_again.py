"""What a forward that is run again in one step has to find as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy

from remat.errors import RematError
from remat.session.cuts import Cuts
from remat_exec import PartialGradientAsked, SecondDerivative
from remat_graph.torch import (
    AllocationRecorder,
    CaptureError,
    copied,
    flatten,
    left_as_it_was,
    remember_generators,
    remember_state,
)

__all__ = ["Before", "rebuilt"]

_Result = TypeVar("_Result")


class Before:
    """What a forward may change by the time that it is run again, as it is now.

    That is the global generators, and gradients of leaves, to which `backward()` in the forward
    adds; in the `first` step also what is stored on the model, and its buffers. These are copied
    where it is seen that the model has several graphs. It is held for as long as the block lasts.
    `again` is called where the forward is run again.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: Any,
        again: Callable[[], None],
        *,
        first: bool,
    ) -> None:
        tensors: list[torch.Tensor] = []
        with suppress(CaptureError):  # of an object that refers to itself
            tensors += flatten(arguments)[0]
        tensors += (each for each in model.parameters() if not is_lazy(each))
        tensors = [each for each in tensors if not each.is_inference()]
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._gradients = [
            (tensor, tensor.grad, _version_of(tensor.grad))
            for tensor in tensors
            if tensor.requires_grad and tensor.is_leaf
        ]
        self._put_back = [again, remember_generators()]
        self._first = first
        self._buffers: list[torch.Tensor] = []
        if first:
            self._put_back.append(remember_state(model))
            self._buffers = list(model.buffers())

    def __enter__(self) -> Before:
        return self

    def __exit__(self, *_: object) -> None:
        self._versions, self._gradients, self._buffers = [], [], []
        with AllocationRecorder.paused():
            self._put_back.clear()

    def copy_buffers(self) -> None:
        """Copy the buffers, unless that is done, or the block has ended."""
        if not self._buffers:
            return
        buffers, self._buffers = self._buffers, []
        with AllocationRecorder.paused():
            self._put_back.append(copied(buffers))

    def run(
        self,
        forward: Callable[[], _Result],
        leave: Callable[[SecondDerivative], None],
        cuts: Cuts,
    ) -> _Result:
        """Run a forward; again, if it asks for a gradient that is not there yet.

        That is one of a gradient, of which `leave` is told; or one of which autograd has a part, as
        long as that adds to the `cuts`.

        Raises:
            PartialGradientAsked: if that does not.
            RematError: if it cannot be run again, since it has changed what it was given.

        Warns:
            UserWarning: if it is run again, and it is not known what was stored on the model.
        """
        while True:
            cut_before = dict(cuts.outputs)
            try:
                return forward()
            except PartialGradientAsked:
                if cuts.outputs == cut_before:
                    raise
            except SecondDerivative as error:
                leave(error)
            self._put_back_all()

    def _put_back_all(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            raise RematError(
                "the forward changes a tensor that it is given, or a parameter, and asks for a "
                "gradient across a break of its graph: its first step would run it twice; change a "
                "copy (tensor.clone())"
            )
        if any(_version_of(gradient) != version for _, gradient, version in self._gradients):
            raise RematError(
                "the forward adds to gradients that are there, by backward(), and asks for a "
                "gradient across a break of its graph: its first step would add them twice; call "
                "zero_grad() before that step"
            )
        for tensor, gradient, _ in self._gradients:
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for put_back in self._put_back:
            put_back()
        if not self._first:
            warnings.warn(
                "the forward was run again in this step, since it asks for a gradient across a "
                "break of its graph that it did not meet before: what it counts itself, in Python "
                "or in buffers, counts again in this step",
                stacklevel=2,
            )


def _version_of(gradient: torch.Tensor | None) -> int | None:
    return None if gradient is None else gradient._version


def rebuilt(
    module: torch.nn.Module, run: Callable[..., Any], args: Any, kwargs: Any, _: Any
) -> Any:
    """Give what a forward returns, run again for that alone: its regions give what is known."""
    with left_as_it_was(module):
        return run(*args, **kwargs)
