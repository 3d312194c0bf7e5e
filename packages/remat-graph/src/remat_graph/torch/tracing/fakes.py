"""Fake tensors, of which only shape, strides, type and device are known."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from remat_graph.torch.errors import CaptureError

__all__ = [
    "StandIns",
    "elements_of",
    "failures_untold",
    "fake_constant",
    "fake_mode_of",
    "forget_originals",
    "has_no_data",
    "is_traced_tensor",
    "new_fake",
    "own_modes",
    "storage_key",
    "without_modes",
    "writes_seen",
]


def is_traced_tensor(item: object) -> bool:
    """Whether a tensor exists only while tracing."""
    return isinstance(item, (FakeTensor, FunctionalTensor)) or (
        isinstance(item, torch.Tensor) and torch._is_functional_tensor(item)
    )


def elements_of(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    """Say how the bytes of a tensor are read as numbers: as what type, conjugated or negated."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the meta device, or was made under a `FakeTensorMode`."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


class StandIns:
    """Fake tensors that are traced in place of those that hold no data.

    One on meta is traced as one on the CPU: on meta torch takes other operators apart, and loses
    gradients. Of a tensor only shape, strides, type and device are taken over.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the stand-in of a tensor; one that holds data stands for itself."""
        pair = self._pairs.get(id(tensor))
        if pair is not None:
            return pair[1]
        if not has_no_data(tensor) or is_traceable_wrapper_subclass(tensor):
            return tensor
        stand_in = self._make(tensor)
        self._pairs[id(tensor)] = (tensor, stand_in)
        self._pairs[id(stand_in)] = (stand_in, stand_in)
        return stand_in

    def without_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the stand-in of a tensor, of one that holds data, too."""
        stand_in = self.of(tensor)
        return stand_in if has_no_data(stand_in) else self._mode.from_tensor(stand_in)

    @contextlib.contextmanager
    def in_place_of_new(self) -> Iterator[None]:
        """Let new tensors hold no data."""
        with self._mode:
            yield

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        fake = new_fake(self._mode, tensor.shape, tensor.stride(), tensor.dtype, device)
        return fake.requires_grad_(tensor.requires_grad)


def new_fake(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    storage: torch.UntypedStorage | None = None,
    offset: int = 0,
) -> FakeTensor:
    """Make a fake tensor, in that storage if one is given, without running an operator."""
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if storage is not None:
            meta.set_(storage, offset, shape, stride)
    return FakeTensor(mode, meta, device)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Leave the user's `FakeTensorMode`, and a default device of meta."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device("cpu"))
        yield


@contextlib.contextmanager
def failures_untold() -> Iterator[None]:
    """Keep torch from logging an operator that refuses fake tensors, which raises besides."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def fake_constant(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """Make the fake tensor of a constant, whose number is known as it was while tracing."""
    fake = mode.from_tensor(tensor)
    if tensor.numel() == 1:
        fake.constant = tensor
    return fake


def fake_mode_of(graph: torch.fx.Graph) -> FakeTensorMode:
    """Find the fake mode in which a joint graph was traced."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise CaptureError("the captured graph has no tensor at all")


def forget_originals(mode: FakeTensorMode) -> None:
    """Drop weak references to the tensors that fake ones were made of.

    `torch.utils.swap_tensors` refuses a tensor that has one.
    """
    describer = mode.fake_tensor_converter.meta_converter.describer
    describer.lookup_tensor.clear()
    describer.lookup_storage.clear()


def storage_key(tensor: torch.Tensor) -> int:
    """Identify the storage of a fake tensor: views of one another have the same key."""
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def own_modes() -> Iterator[None]:
    """Leave the user's modes, autocast too: the casts of a traced program are calls of its own."""
    with (
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        without_modes(),
    ):
        yield


def writes_seen(tensor: torch.Tensor) -> tuple[int, int]:
    """Count writes to a tensor's memory.

    While a graph is traced they are all seen: autograd counts none to `.data`, none of those that
    the schema of an operator hides, as a batch norm's to its statistics.
    """
    if not isinstance(tensor, FunctionalTensor):
        return tensor._version, 0
    return tensor._version, torch._functionalize_mutation_counter(tensor.elem)
