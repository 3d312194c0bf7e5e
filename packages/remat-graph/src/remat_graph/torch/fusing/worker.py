"""Compiles kernels in a process of its own, for the caches on disk from which others load them.

Run as `python -m remat_graph.torch.fusing.worker`: reads kernels from standard input. Its results
are the files that Inductor caches.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from typing import BinaryIO

import torch

from remat_graph.torch.fusing.compiling import compile_kernels
from remat_graph.torch.fusing.kernel import Kernel

__all__ = ["main"]


def main(source: BinaryIO) -> None:
    """Compile what comes in on a stream."""
    parent, threads, kernels = pickle.load(source)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)
    for key, body, facts in kernels:
        compile_kernels([Kernel(key, body, facts)])


def _end_with(parent: int) -> None:
    """End this process and those that it started, once the one that started it has gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    main(sys.stdin.buffer)
