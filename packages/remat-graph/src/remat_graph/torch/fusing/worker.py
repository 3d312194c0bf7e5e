"""Compiles kernels in a process of its own, for the caches on disk from which others load them.

Run as `python -m remat_graph.torch.fusing.worker`: reads kernels from standard input, says `done`
for each on standard output. Its results are the files that Inductor caches.
"""

from __future__ import annotations

import pickle
import sys
from typing import BinaryIO, TextIO

import torch

from remat_graph.torch.fusing.compiling import compile_kernels
from remat_graph.torch.fusing.kernel import Kernel

__all__ = ["main"]


def main(source: BinaryIO, told: TextIO) -> None:
    """Compile what comes in on one stream, and tell of each on the other."""
    threads, kernels = pickle.load(source)  # of the process that started this one
    torch.set_num_threads(threads)
    for key, body, facts in kernels:
        compile_kernels([Kernel(key, body, facts)])
        print("done", file=told, flush=True)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout)
