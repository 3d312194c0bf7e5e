"""What is installed: `solvers` and `doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

import torch
from rich.table import Table

from remat.cache import Store
from remat.command.main import app
from remat.command.terminal import JsonOption, out, print_json, print_rows
from remat.free_memory import free_bytes
from remat_exec import list_executors
from remat_graph.torch import list_captures
from remat_solvers import SolverError, get_solver, list_solvers

__all__ = ["doctor", "solvers"]

_OURS = ("remat", "remat-graph", "remat-partition", "remat-solvers", "remat-exec")
_OTHERS = ("torch", "highspy", "cvxpy", "gurobipy", "transformers", "matplotlib", "triton")


@app.command()
def solvers(json: JsonOption = False) -> None:
    """List the installed solvers and the distributions they come from."""
    found = {name: str(info.distribution) for name, info in list_solvers().items()}
    if json:
        print_json(found)
        return
    table = Table("solver", "distribution")
    for name, distribution in found.items():
        table.add_row(name, distribution)
    out.print(table)


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Say what is installed, with licences, and what will not work here and why."""
    versions = {name: _version(name) for name in (*_OURS, *_OTHERS)}
    devices = _devices()
    broken = _broken_solvers()
    store = Store.here()
    missing = _missing(versions, broken)
    plugins = {
        "captures": sorted(list_captures()),
        "executors": sorted(list_executors()),
        "solvers": [name for name in list_solvers() if name not in broken],
    }
    folder = None if store is None else str(store.folder)
    if json:
        print_json(
            {
                "python": platform.python_version(),
                "versions": versions,
                "devices": devices,
                **plugins,
                "cache": folder,
                "will_not_work": missing,
            }
        )
        return
    print_rows(
        {
            "python": platform.python_version(),
            **{name: said or "not installed" for name, said in versions.items()},
            "devices": devices,
            **{kind: ", ".join(names) for kind, names in plugins.items()},
            "cache": folder or "switched off by REMAT_CACHE",
            "will not work": missing or "nothing is known that will not",
        }
    )


def _version(name: str) -> str | None:
    """Say the version and licence of a distribution."""
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    stated = [*(metadata.get_all("License-Expression") or []), *(metadata.get_all("License") or [])]
    licence = stated[0] if stated else ""
    if not licence or len(licence) > 60:
        classifiers = metadata.get_all("Classifier") or []
        licences = [c.rsplit(" :: ", 1)[1] for c in classifiers if c.startswith("License")]
        licence = ", ".join(licences) or "licence not stated"
    return f"{metadata['Version']}, {licence}"


def _devices() -> list[str]:
    found = [
        f"cpu, {torch.get_num_threads()} threads, {free_bytes(torch.device('cpu')):,} bytes free"
    ]
    for index in range(torch.cuda.device_count()):
        free = free_bytes(torch.device("cuda", index))
        found.append(f"{torch.cuda.get_device_name(index)}, {free:,} bytes free")
    return found


def _broken_solvers() -> dict[str, str]:
    broken = {}
    for name in list_solvers():
        try:
            get_solver(name)
        except SolverError as error:
            broken[name] = str(error)
    return broken


def _missing(versions: dict[str, str | None], broken: dict[str, str]) -> list[str]:
    found = [f"solver {name}: {reason}" for name, reason in broken.items()]
    if not torch.cuda.is_available():
        found.append("training on CUDA: torch sees no device")
    if versions["matplotlib"] is None:
        found.append("pictures of curves: pip install 'remat[plot]'")
    if versions["transformers"] is None:
        found.append("planning by a model type: pip install transformers")
    if versions["gurobipy"] is None:
        found.append("Gurobi as a back end: pip install gurobipy, and a licence")
    if importlib.util.find_spec("psutil") is None and platform.system() != "Linux":
        found.append("budget='auto': pip install psutil")
    return found
