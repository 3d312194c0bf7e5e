"""What is installed: `solvers` and `doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import platform

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from remat.command.main import app
from remat.command.terminal import JsonOption, out, print_json, print_rows

__all__ = ["doctor", "solvers"]

_OURS = ("remat", "remat-graph", "remat-partition", "remat-solvers", "remat-exec")
_OTHERS = (
    "torch",
    "highspy",
    "cvxpy",
    "gurobipy",
    "transformers",
    "matplotlib",
    "plotly",
    "triton",
)


@app.command()
def solvers(json: JsonOption = False) -> None:
    """List the installed solvers, what each is, and the distributions they come from."""
    from remat_solvers import list_solvers

    distributions = {name: str(info.distribution) for name, info in list_solvers().items()}
    if json:
        print_json(distributions)
        return
    table = Table("solver", "what it is", box=SIMPLE_HEAD, pad_edge=False)
    for name, distribution in distributions.items():
        others = "" if distribution.startswith("remat-solvers") else f" ({distribution})"
        table.add_row(name, Text(_what(name) + others))
    out.print(table)
    out.print("docs/solvers.md has papers, guarantees and when to use each; 'auto' is refine.")


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Say what is installed, with licences, and what will not work here and why."""
    from remat.cache import Store
    from remat_exec import list_executors
    from remat_graph.torch import list_captures
    from remat_solvers import list_solvers

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


def _what(name: str) -> str:
    """Give the first line of what a solver says of itself, or why it cannot be loaded."""
    from remat_solvers import SolverError, get_solver

    try:
        said = inspect.getdoc(type(get_solver(name)))
    except SolverError as error:
        said = str(error)
    return (said or "").partition("\n")[0].replace("`", "")


def _version(name: str) -> str | None:
    """Describe the version and licence of a distribution."""
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    expression, stated = (metadata.get_all(f"License{kind}") for kind in ("-Expression", ""))
    licence = (expression or stated or [""])[0]
    if not licence or (expression is None and len(licence) > 60):  # not a name, but the text of one
        classifiers = metadata.get_all("Classifier") or []
        licences = [c.rsplit(" :: ", 1)[1] for c in classifiers if c.startswith("License")]
        licence = ", ".join(licences) or "licence not stated"
    return f"{metadata['Version']}, {licence}"


def _devices() -> list[str]:
    import torch

    from remat.budgets.free_memory import free_bytes

    devices = [
        f"cpu, {torch.get_num_threads()} threads, {free_bytes(torch.device('cpu')):,} bytes free"
    ]
    for index in range(torch.cuda.device_count()):
        free = free_bytes(torch.device("cuda", index))
        devices.append(f"{torch.cuda.get_device_name(index)}, {free:,} bytes free")
    return devices


def _broken_solvers() -> dict[str, str]:
    from remat_solvers import SolverError, get_solver, list_solvers

    broken = {}
    for name in list_solvers():
        try:
            get_solver(name)
        except SolverError as error:
            broken[name] = str(error)
    return broken


def _missing(versions: dict[str, str | None], broken: dict[str, str]) -> list[str]:
    import torch

    missing = [f"solver {name}: {reason}" for name, reason in broken.items()]
    if not torch.cuda.is_available():
        missing.append("training on CUDA: torch sees no device")
    if versions["matplotlib"] is None:
        missing.append("pictures of curves: pip install 'remat[plot]'")
    if versions["plotly"] is None:
        missing.append("reports: pip install 'remat[report]'")
    if versions["transformers"] is None:
        missing.append("planning by a model type: pip install transformers")
    if versions["gurobipy"] is None:
        missing.append("Gurobi as a back end: pip install gurobipy, and a licence")
    if importlib.util.find_spec("psutil") is None and platform.system() != "Linux":
        missing.append("budget='auto': pip install psutil")
    return missing
