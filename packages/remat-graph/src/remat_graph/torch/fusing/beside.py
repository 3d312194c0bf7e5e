"""Kernels that are compiled beside the training, in processes of their own."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
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
        self._processes = list[subprocess.Popen[bytes]]()
        weakref.finalize(self, _stop, self._processes)
        try:
            for at in range(count):
                self._processes.append(_started(waiting[at::count]))
                _running.add(self._processes[-1])
        except OSError as error:  # no memory, no place for files, no Python to be found
            logger.info("kernels are compiled by this process, for no other starts: %s", error)
            return
        if waiting:
            logger.info("compiling %d kernels in %d processes", len(waiting), count)

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
    """Start a process, which reads its job from a file: a pipe would wait until it has loaded."""
    items = [(kernel.key, kernel.body, dict(kernel.facts)) for kernel in kernels]
    with tempfile.TemporaryFile() as job:
        _Pickler(job).dump((os.getpid(), torch.get_num_threads(), items))
        job.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", "remat_graph.torch.fusing.worker"],
            stdin=job,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for this process, which ends those
        )


def _stop(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End processes and those that they started, such as a compiler."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


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
