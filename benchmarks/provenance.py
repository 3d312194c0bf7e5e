"""What figures were made on: the commit, the versions, the machine, the date."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["commit", "provenance"]

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
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
