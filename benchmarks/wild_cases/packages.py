"""Where packages are found that only these cases need: in a folder of the environment of its own.

They stand behind what the environment has, so torch and all that the other benchmarks use stay.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from matrix_cases.case import NotRunnable
from matrix_cases.stand_ins import stood_in

__all__ = ["FOLDER", "load"]

FOLDER = Path(sys.prefix) / "wild"


def load(module: str) -> Any:
    """Import a module of a package.

    Raises:
        NotRunnable: if the package is not installed.
    """
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if find_spec(module.partition(".")[0]) is None:
        raise NotRunnable(f"{module} is not installed: `hatch run wild` installs it")
    with stood_in():
        return importlib.import_module(module)
