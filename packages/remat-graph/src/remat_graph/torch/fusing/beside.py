"""Kernels that are compiled beside the training, in processes of their own."""

from __future__ import annotations

import atexit
import io
import logging
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from remat_graph.torch.fusing.kernel import Kernel

__all__ = ["Compilation"]

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 4
_KERNELS_EACH = 4  # at least: a process takes seconds to start


class Compilation:
    """Compiles kernels in other processes, into the caches on disk from which this one loads them.

    It ends with this process, or when nobody holds it any more.
    """

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        waiting = [kernel for kernel in kernels if not kernel.is_settled]
        count = min(_MOST_PROCESSES, os.cpu_count() or 1, -(-len(waiting) // _KERNELS_EACH))
        self.count = len(waiting)
        self._processes = [_started(waiting[at::count]) for at in range(count)]
        if waiting:
            logger.info("compiling %d kernels in %d processes", len(waiting), count)
        for process in self._processes:
            _running.add(process)
        weakref.finalize(self, _stop, self._processes)

    @property
    def is_done(self) -> bool:
        """Whether all that could be compiled has been."""
        return all(process.poll() is not None for process in self._processes)

    def wait(self) -> None:
        """Wait until it is done; Ctrl-C ends it."""
        try:
            for process in self._processes:
                process.wait()
        except BaseException:
            _stop(self._processes)
            raise


_running: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def _started(kernels: Sequence[Kernel]) -> subprocess.Popen[bytes]:
    job = io.BytesIO()
    items = [(kernel.key, kernel.body, dict(kernel.facts)) for kernel in kernels]
    _Pickler(job).dump((torch.get_num_threads(), items))
    process = subprocess.Popen(
        [sys.executable, "-m", "remat_graph.torch.fusing.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C is for this process, which ends those
    )
    assert process.stdin is not None
    with process.stdin as stream:
        stream.write(job.getbuffer())
    return process


def _stop(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()


atexit.register(lambda: _stop(list(_running)))


class _Pickler(pickle.Pickler):
    """Pickles operators of torch, which do not pickle themselves, by their names."""

    def reducer_override(self, item: Any) -> Any:
        """Give how to make an operator again."""
        if isinstance(item, torch._ops.OpOverload):
            return _operator, (item.namespace, item._opname, item._overloadname)
        return NotImplemented


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
