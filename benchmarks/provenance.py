"""What figures were made on: the commit, the versions, the machine, the date."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from remat_graph import write_atomically

__all__ = ["as_json", "commit", "provenance", "write_results"]

ROOT = Path(__file__).parents[1]
NOT_CODE = (":(exclude)benchmarks/results", ":(exclude)docs", ":(exclude)*.md")


def commit() -> str:
    """Name the commit that is checked out, with `-dirty` if code differs from it.

    Results and pages are not code.
    """
    name = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *NOT_CODE)
    return f"{name}-dirty" if changed else name


def provenance(packages: Sequence[str] = ("remat", "torch")) -> dict[str, Any]:
    """Describe the machine, the versions and the commit, with today's date (UTC)."""
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": {package: _version(package) for package in packages},
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def write_results(
    path: Path, found: dict[str, Any], packages: Sequence[str] = ("remat", "torch")
) -> None:
    """Write what was found, and what on; a reader sees the old file or the new."""
    content = {"machine": provenance(packages), **found}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, as_json(content))


def as_json(content: dict[str, Any]) -> str:
    """Write out what was found, with the files that it names as on any machine."""
    text = json.dumps(content, indent=1) + "\n"
    wild = str(Path(sys.prefix) / "wild")
    for folder in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), wild, str(ROOT)):
        text = text.replace(json.dumps(f"{folder}{os.sep}")[1:-1], "")
    return text


def _processor() -> str:
    """Name the model, such as that which Linux tells; the architecture where nothing is told."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        told = ""
    models = [line.partition(":")[2].strip() for line in told.splitlines() if "model name" in line]
    return models[0] if models else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
