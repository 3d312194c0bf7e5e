"""What an entry is valid for, as words, and the name of its file."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

import remat_graph
import remat_partition
import remat_solvers
from remat.__about__ import __version__
from remat_graph import Graph, canonical_hash
from remat_solvers import list_solvers

__all__ = ["costs_key", "file_name", "solution_key"]


def costs_key(device: torch.device) -> dict[str, str]:
    """Name what measured times and workspaces depend on, beside the operator and its shapes."""
    key = {
        "remat-graph": remat_graph.__version__,
        "torch": str(torch.__version__),
        "device": device.type,
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    if device.type == "cuda":
        key["name"] = torch.cuda.get_device_name(device)
        key["cuda"] = str(torch.version.cuda or torch.version.hip)
        key["cudnn"] = str(torch.backends.cudnn.benchmark)
    return key


def solution_key(graph: Graph, solver: str, limit_seconds: float | None) -> dict[str, str]:
    """Name what a solution depends on, beside the budget: the graph with its costs, and solvers."""
    named = list_solvers().get(solver)
    return {
        "graph": canonical_hash(graph),
        "solver": solver if named is None else f"{solver} of {named}",
        "limit_seconds": repr(limit_seconds),
        "remat": __version__,
        "remat-graph": remat_graph.__version__,
        "remat-partition": remat_partition.__version__,
        "remat-solvers": remat_solvers.__version__,
    }


def file_name(key: Mapping[str, str]) -> str:
    """Hash a key: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


@functools.cache
def _processor() -> str:
    """Name the CPU, also on Linux, where `platform` knows its architecture alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
