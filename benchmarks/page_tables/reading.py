"""What tables are made with: results read, cells and columns written as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Row", "markdown", "mib", "percent", "results", "source", "spread"]

RESULTS = Path(__file__).parents[1] / "results"
PARTS = ("cases", "cells", "rows", "loops")  # of results that are measured one by one

Row = dict[str, Any]


def results(name: str) -> Row:
    """Read the results of a benchmark."""
    content: Row = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def source(name: str) -> str:
    """Say what a table was made of, and on what that was measured: of several runs, the last."""
    content = results(name)
    machine = content["machine"]
    versions = [f"{package} {version}" for package, version in machine.get("versions", {}).items()]
    cores = f"{machine['cores']} cores" if "cores" in machine else None
    facts = [machine.get("processor"), cores, *versions]
    told = ", ".join(fact for fact in facts if fact)
    return (
        f"`benchmarks/results/{name}.json`: commit {machine['commit']}, {machine['date']}"
        + (f"; {told}" if told else "; machine not recorded")
        + "."
        + _runs(content)
    )


def _runs(content: Row) -> str:
    """Count the parts by the commit that they ran at, if there are several."""
    kind = next((kind for kind in PARTS if kind in content), None)
    if kind is None or not any("commit" in part for part in content[kind]):
        return ""
    ran = Counter(part.get("commit", "unknown") for part in content[kind]).most_common()
    if len(ran) == 1:
        return ""
    told = ", ".join(f"{commit} {count}" for commit, count in ran)
    return f" {kind.capitalize()} by the commit they ran at: {told}."


def markdown(heading: Sequence[str], rows: Iterable[Sequence[object]], name: str = "") -> str:
    """Write a table; with the name of its results, what it was made of stands below."""
    lines = [_line(heading), "|" + "---|" * len(heading), *map(_line, rows)]
    return "\n".join([*lines, "", source(name)] if name else lines)


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def percent(share: float, digits: int = 1) -> str:
    """Write a share in percent."""
    return f"{100 * share:.{digits}f}%"


def mib(size: float) -> str:
    """Write bytes as MiB."""
    return f"{size / 2**20:.1f} MiB"


def spread(values: Iterable[float], digits: int = 1) -> str:
    """Write the least and the most of some numbers."""
    found = list(values)
    least, most = f"{min(found):.{digits}f}", f"{max(found):.{digits}f}"
    return least if least == most else f"{least} to {most}"
