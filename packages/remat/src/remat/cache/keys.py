"""What an entry is valid for, as words, and the name of its file."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import remat_graph
import remat_partition
import remat_solvers
from remat.__about__ import __version__
from remat_graph import Graph, canonical_hash
from remat_partition import Partitioner, resolve_partitioner
from remat_solvers import Solver, resolve_solver

if TYPE_CHECKING:
    import torch

__all__ = ["costs_key", "file_name", "solution_key"]


def costs_key(device: torch.device) -> dict[str, str]:
    """Name what measured times and workspaces depend on, beside the operator and its shapes."""
    import torch  # noqa: PLC0415 - takes seconds

    key = {
        "remat-graph": remat_graph.__version__,
        "torch": str(torch.__version__),
        "device": device.type,
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "precision": _precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    if device.type == "cuda":
        key["name"] = torch.cuda.get_device_name(device)
        key["cuda"] = str(torch.version.cuda or torch.version.hip)
        key["cudnn"] = str(torch.backends.cudnn.benchmark)
    return key


def solution_key(
    graph: Graph,
    solver: str | Solver,
    limit_seconds: float | None,
    partitioner: str | Partitioner | None,
) -> dict[str, str] | None:
    """Name what a solution depends on, beside the budget: the graph with its costs, and solvers.

    `None` if that is not known: of a solver or a partitioner that no installed distribution offers,
    or with settings that cannot be written down.
    """
    method = "auto" if solver == "auto" else resolve_solver(solver).identity
    cut = "default" if partitioner is None else resolve_partitioner(partitioner).identity
    if method is None or cut is None:
        return None
    return {
        "graph": canonical_hash(graph),
        "solver": method,
        "partitioner": cut,
        "limit_seconds": repr(limit_seconds),
        "remat": __version__,
        "remat-graph": remat_graph.__version__,
        "remat-partition": remat_partition.__version__,
        "remat-solvers": remat_solvers.__version__,
    }


def file_name(key: Mapping[str, str]) -> str:
    """Hash a key: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def _precision() -> str:
    """Name how precisely products and convolutions of 32 bits are computed, by either interface."""
    import torch  # noqa: PLC0415 - takes seconds

    backends: Any = torch.backends
    each = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn,
            backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)  # fmt: skip
    names = [str(backend.fp32_precision) for backend in each]
    with contextlib.suppress(RuntimeError):  # it was set by the newer interface
        names.append(torch.get_float32_matmul_precision())
    return " ".join(names)


@functools.cache
def _processor() -> str:
    """Name the CPU, also on Linux, where `platform` knows its architecture alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
