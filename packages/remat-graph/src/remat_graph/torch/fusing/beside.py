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
import time
import weakref
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from remat_graph.torch.fusing.kernel import Kernel
from remat_graph.torch.fusing.missing import see_compiled
from remat_graph.torch.fusing.settings import Settings

__all__ = ["Compilation"]

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 4
_KERNELS_EACH = 4  # at least: a process takes seconds to start
_IDLE_SECONDS = 30.0  # after which a process ends itself
_SURELY_THERE = 0.5  # of these seconds
_ENDING_SECONDS = 5.0


class Compilation:
    """Compiles kernels in other processes, into the caches on disk from which this one loads them.

    It ends with this process, or when nobody holds it any more. Processes that are done wait a
    while for the next one.
    """

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        waiting = [
            kernel for kernel in kernels if not (kernel.is_settled or kernel.take_code_of_sizes())
        ]
        count = min(_MOST_PROCESSES, os.cpu_count() or 1, -(-len(waiting) // _KERNELS_EACH))
        self.count = len(waiting)
        self._kernels = waiting
        self._workers = list[_Worker]()
        weakref.finalize(self, _give_back, self._workers)
        try:
            for at in range(count):
                self._workers.append(_free_worker())
                self._workers[-1].send(waiting[at::count])
        except OSError as error:  # no memory, no place for files, no Python to be found
            logger.info("kernels are compiled by this process, for no other starts: %s", error)
            return
        if waiting:
            logger.info("compiling %d kernels in %d processes", len(waiting), count)

    @property
    def is_done(self) -> bool:
        """Whether all that could be compiled has been."""
        is_done = not any(worker.is_busy() for worker in self._workers)
        if is_done:
            self._end()
        return is_done

    def wait(self) -> None:
        """Wait until it is done; Ctrl-C ends it."""
        try:
            for worker in self._workers:
                while worker.is_busy():
                    worker.wait()
        finally:
            self._end()

    def _end(self) -> None:
        _give_back(self._workers)
        see_compiled(self._kernels)
        self._kernels = []


class _Worker:
    """A process that compiles one job after another; of each, it says when it is done."""

    def __init__(self) -> None:
        self.environment = _environment()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "remat_graph.torch.fusing.worker", str(_IDLE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self.environment,
            start_new_session=True,  # Ctrl-C is for this process, which ends those
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._jobs, self._said = self.process.stdin, self.process.stdout
        self._path: Path | None = None
        self._free_since = time.monotonic()
        _running.add(self)

    def send(self, kernels: Sequence[Kernel]) -> None:
        """Hand over a job, in a file: a pipe would wait until the process has loaded.

        Raises:
            OSError: if there is no place for the file.
        """
        items = [
            (kernel.sized, kernel.symbols)
            if kernel.sized is not None and kernel.sized.may_have_more
            else (kernel.key, kernel.body, dict(kernel.facts))
            for kernel in kernels
        ]
        descriptor, path = tempfile.mkstemp(prefix="remat-kernels-")
        self._path = Path(path)
        with os.fdopen(descriptor, "wb") as job:
            _Pickler(job).dump((Settings.read(), items))
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is seen
            self._jobs.write(f"{self._path}\n".encode())
            self._jobs.flush()

    def is_busy(self) -> bool:
        """Whether it has a job that is not done; it has none if it has ended."""
        if self._path is not None and wait([self._said.fileno()], 0):
            os.read(self._said.fileno(), 1)  # nothing, at the end of the process
            self._path.unlink(missing_ok=True)
            self._path, self._free_since = None, time.monotonic()
        return self._path is not None

    def wait(self) -> None:
        """Wait until it says something, or ends."""
        wait([self._said.fileno()])

    @property
    def is_free(self) -> bool:
        """Whether it can have a job: it is there, and was started as one would be now."""
        is_there = time.monotonic() - self._free_since < _SURELY_THERE * _IDLE_SECONDS
        return is_there and self.process.poll() is None and self.environment == _environment()

    def stop(self) -> None:
        """End it, and what it started, such as a compiler."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)  # a compiler deletes what is half done
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_ENDING_SECONDS)
        for stream in (self._jobs, self._said):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


_running: weakref.WeakSet[_Worker] = weakref.WeakSet()
_free: list[_Worker] = []


def _environment() -> dict[str, str]:
    """Give the environment of a process, without what compiling puts into that of this one."""
    paths = [path for path in sys.path if path and Path(path).name != "_vendor"]  # of setuptools
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)
    return environment


def _free_worker() -> _Worker:
    with contextlib.suppress(IndexError):  # another thread may take the last
        while True:
            worker = _free.pop()
            if worker.is_free:
                return worker
            worker.stop()
    return _Worker()


def _give_back(workers: list[_Worker]) -> None:
    """Keep those that are done for others, and end those that are not."""
    while workers:
        worker = workers.pop()
        if worker.is_busy():
            worker.stop()
        else:
            _free.append(worker)


@atexit.register
def _stop_all() -> None:
    for worker in list(_running):
        worker.stop()


class _Pickler(pickle.Pickler):
    """Pickles operators of torch, which do not pickle themselves, by their names."""

    def reducer_override(self, item: Any) -> Any:
        """Give how to make an operator again."""
        if isinstance(item, torch._ops.OpOverload):
            return _operator, (item.namespace, item._opname, item._overloadname)
        return NotImplemented


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
