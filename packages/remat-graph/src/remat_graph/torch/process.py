"""What belongs to the process and not to a thread: one lock around it, and putting it back.

Tracing and measuring set flags of torch, filters of warnings and random generators, which all
threads share. Whoever does so holds `process_lock`, so that each puts back what was there before
it. It is taken before torch's own lock around compilations, never after.

Who holds it may call a backward, which runs on a device in threads of torch, and what runs there
may take the lock again. So who holds it is noted in what torch hands to these threads.

What measures memory on the CPU needs the profiler of its thread. Where that is the user's, it runs
`beside_profilers`: in another thread, of which the user's profiler sees nothing.
"""

from __future__ import annotations

import contextvars
import ctypes
import gc
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

__all__ = [
    "beside_profilers",
    "collector_at_rest",
    "generators_restored",
    "graph_runs",
    "own_thread",
    "process_lock",
    "quietly",
    "remember_generators",
    "remember_modes",
    "remember_numbers",
]

_Result = TypeVar("_Result")
_HOLDER = "remat: holder of the process lock"


class _ProcessLock:
    """A lock that its thread may take again, and so may one that works for it while it waits."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        thread = threading.current_thread()
        if own_thread() is thread:
            self._lock.acquire()
            self._depth += 1
            if self._depth == 1:
                torch._C._stash_obj_in_tls(_HOLDER, thread)

    def __exit__(self, *_: object) -> None:
        if own_thread() is threading.current_thread():
            self._depth -= 1
            if not self._depth:
                _remove_holder()
            self._lock.release()


process_lock = _ProcessLock()


def _remove_holder() -> None:
    if hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(_HOLDER)
    else:  # torch 2.11
        torch._C._stash_obj_in_tls(_HOLDER, None)


def own_thread() -> threading.Thread:
    """Give this thread, or the one that holds `process_lock` and waits for what this one does.

    That is beside its profiler, or in its backward.
    """
    holder: threading.Thread | None = None
    if torch._C._is_key_in_tls(_HOLDER):
        holder = torch._C._get_obj_in_tls(_HOLDER)
    return holder or threading.current_thread()


def beside_profilers(device: torch.device, work: Callable[[], _Result]) -> _Result:
    """Do something that measures memory; in another thread if this one is profiled, on the CPU."""
    if device.type != "cpu" or not torch._C._autograd._profiler_enabled():
        return work()
    done: list[_Result] = []
    raised: list[BaseException] = []
    modes = _thread_modes()
    context, waiting = contextvars.copy_context(), own_thread()

    def run() -> None:
        torch._C._stash_obj_in_tls(_HOLDER, waiting)
        try:
            with modes():
                done.append(context.run(work))
        except BaseException as error:  # also of the keyboard: it is raised in the user's thread
            raised.append(error)
        finally:
            _remove_holder()

    with process_lock:
        thread = threading.Thread(target=run, name="remat: beside a profiler")
        thread.start()
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:
                ident, kind = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(type(error))
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, kind)
    if raised:
        raise raised.pop()
    return done[0]


def _thread_modes() -> Callable[[], Any]:
    """Note the modes of this thread that change what is computed; give what sets them in a new."""
    set_autocast, has_grad = _remember_autocast(), torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()

    @contextmanager
    def set_here() -> Iterator[None]:
        set_autocast()
        torch.autocast_increment_nesting()  # else the end of a block clears the user's cache
        with torch.inference_mode(inference), torch.set_grad_enabled(has_grad):
            yield

    return set_here


@contextmanager
def quietly() -> Iterator[None]:
    """Silence all warnings; other threads wait, for the filters are one list."""
    with process_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def graph_runs() -> Iterator[None]:
    """Run a graph of TorchDynamo: quietly, and without what it set if it raises.

    It enters an autocast and leaves it by two calls, and switches gradients off and on by two. If
    an operator between them raised, it left the autocast's nesting one too deep: then casts of
    weights that autocast keeps are never let go of again in this process.
    """
    put_back = remember_modes()
    try:
        with quietly():
            yield
    except BaseException:
        put_back()
        raise


def remember_modes() -> Callable[[], None]:
    """Note how this thread differentiates and casts; give what puts that back.

    That is whether gradients, autocast and hooks of what is saved are on, and the transforms of
    `torch.func` that it is in.
    """
    set_autocast, depth = _remember_autocast(), _depth_of_autocast()
    has_grad, has_forward_grad = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    hooks: Any = torch._C._autograd
    may_save_by_hooks = hooks._saved_tensors_hooks_is_enabled()
    transforms = torch._C._functorch.get_dynamic_layer_stack_depth()

    def put_back() -> None:
        if torch._C._functorch.get_dynamic_layer_stack_depth() > transforms:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(transforms)
        if forward_ad._current_level < 0:  # the caller has no dual level open
            with suppress(RuntimeError):  # nor has the graph
                torch._C._exit_dual_level(level=0)
        if may_save_by_hooks:
            hooks._saved_tensors_hooks_enable()
        torch._C._set_fwd_grad_enabled(has_forward_grad)
        torch.set_grad_enabled(has_grad)
        set_autocast()
        for _ in range(depth, _depth_of_autocast()):
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    return put_back


def _depth_of_autocast() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _remember_autocast() -> Callable[[], None]:
    """Note the autocast of this thread; give what sets it, in this one or another."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu", "cuda" if accelerator is None else accelerator.type)
    states = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    is_cached = torch.is_autocast_cache_enabled()

    def set_autocast() -> None:
        for kind, enabled, dtype in states:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(is_cached)

    return set_autocast


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Look for no cycles of objects: each search goes through all that torch has loaded.

    For work that holds no data: what is left in cycles is freed after it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def remember_numbers() -> Callable[[], None]:
    """Note where the global generators of Python and NumPy stand; give what puts that back."""
    python_state = random.getstate()
    numpy: Any = sys.modules.get("numpy.random")
    numpy_state = None if numpy is None else numpy.get_state(legacy=False)

    def put_back() -> None:
        random.setstate(python_state)
        if numpy is not None:
            numpy.set_state(numpy_state)

    return put_back


def remember_generators() -> Callable[[], None]:
    """Note where the global generators stand; give what puts that back.

    Those of Python, of NumPy, and of torch: of the CPU and of all CUDA devices in use.
    """
    generators = (torch.default_generator, *torch.cuda.default_generators)
    states = [each.get_state().numpy().tobytes() for each in generators]  # a tensor would count
    numbers = remember_numbers()

    def put_back() -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        numbers()

    return put_back


@contextmanager
def generators_restored() -> Iterator[None]:
    """Put back the global generators of torch, Python and NumPy."""
    put_back = remember_generators()
    try:
        yield
    finally:
        put_back()
