"""Compiles kernels in a process of its own, for the caches on disk from which others load them.

Run as `python -m remat_graph.torch.fusing.worker SECONDS`: reads from standard input the names of
files with kernels, one to a line, and writes a byte when those of one have been compiled. It ends
after so many seconds without one. Its results are the files that Inductor caches.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import time
from pathlib import Path

from remat_graph.torch.fusing.compiling import compile_for_sizes, compile_kernels
from remat_graph.torch.fusing.kernel import Kernel
from remat_graph.torch.fusing.sized_code import SizedCode

__all__ = ["main"]


def main(idle_seconds: float) -> None:
    """Compile what is named on standard input."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    done = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a compiler may print
    jobs = os.fdopen(0, "rb", buffering=0)
    while select.select([jobs], [], [], idle_seconds)[0]:
        path = jobs.readline().decode().rstrip("\n")
        if not path:
            return
        with contextlib.suppress(FileNotFoundError):  # nobody waits for it any more
            _compile(Path(path))
        os.write(done, b".")


def _compile(path: Path) -> None:
    settings, kernels = pickle.loads(path.read_bytes())
    settings.use()
    for first, *others in kernels:
        if isinstance(first, SizedCode):
            compile_for_sizes(first, *others)
        else:
            compile_kernels([Kernel(first, *others)])


def _end_with(parent: int) -> None:
    """End this process and those that it started, once the one that started it has gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    main(float(sys.argv[1]))
