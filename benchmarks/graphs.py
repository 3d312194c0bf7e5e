"""The twelve published models as training graphs with estimated costs, captured once and kept.

Nothing is run: costs are estimated for one fixed device, so that the graphs are the same on every
machine. They are kept as JSON in `benchmarks/.cache`, which git ignores; delete it to capture anew.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import zoo
from remat_graph import Graph, load, save
from remat_graph.torch import DeviceSpec, capture

__all__ = ["CACHE", "DEVICE", "captured"]

CACHE = Path(__file__).parent / ".cache"
DEVICE = DeviceSpec(
    name="a few CPU cores",
    flops_per_second=1e11,
    half_flops_per_second=5e10,
    bytes_per_second=2e10,
    launch_seconds=3e-6,
)


def captured(name: str) -> Graph:
    """Load the graph of a published model, or capture it, in a process of its own."""
    path = CACHE / f"{name}.json"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        (CACHE / ".gitignore").write_text("*\n", encoding="utf-8")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            save(executor.submit(_capture, name).result(), path)
    graph = load(path)
    if not isinstance(graph, Graph):
        raise TypeError(f"{path} holds a {type(graph).__name__}, not a Graph; delete it")
    return graph


def _capture(name: str) -> Graph:
    torch.set_num_threads(1)
    example = zoo.published(name)
    return capture(example.model, example.args, example.kwargs, costs=DEVICE).graph
