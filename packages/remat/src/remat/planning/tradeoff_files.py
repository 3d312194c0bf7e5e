"""The curve of time against peak as a file of JSON, and as a picture."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remat.errors import RematError
from remat_graph import encode, write_atomically
from remat_solvers import Tradeoff, TradeoffPoint

__all__ = ["check_picture", "plot_tradeoff", "save_tradeoff", "tradeoff_document"]

_VERSION = 1


def save_tradeoff(curve: Tradeoff, path: str | os.PathLike[str]) -> None:
    """Write a curve as JSON, atomically: a reader sees the old file or the whole new one.

    Each solution is the body of a document as `remat_graph.save` writes it.

    Raises:
        OSError: if the folder does not exist or cannot be written.
    """
    write_atomically(path, json.dumps(tradeoff_document(curve), separators=(",", ":")) + "\n")


def tradeoff_document(curve: Tradeoff) -> dict[str, Any]:
    """Give a curve as the document that `save_tradeoff` writes."""
    body = {
        "store_all_peak_bytes": curve.store_all_peak_bytes,
        "store_all_time": curve.store_all_time,
        "smallest_bytes": curve.smallest_bytes,
        "least_bytes": curve.least_bytes,
        "solver": curve.solver,
        "seconds": curve.seconds,
        "doubt": curve.doubt,
        "points": [_point_body(point) for point in curve.points],
    }
    return {"kind": "tradeoff", "version": _VERSION, "body": body}


def _point_body(point: TradeoffPoint) -> dict[str, Any]:
    solution = point.solution
    return {
        "budget_bytes": point.budget_bytes,
        "status": point.status.value,
        "lower_bound": point.lower_bound,
        "proved_infeasible": point.proved_infeasible,
        "seconds": point.seconds,
        "error": None if point.error is None else str(point.error),
        "solution": None if solution is None else json.loads(encode(solution))["body"],
    }


def check_picture(path: str | os.PathLike[str]) -> None:
    """Ask before work whether a picture can be written there.

    Raises:
        RematError: if matplotlib is missing, or writes no such files.
        OSError: if the folder does not exist.
    """
    target = Path(path)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    except ImportError:
        raise RematError(
            "a picture of the curve needs matplotlib; pip install 'remat[plot]'"
        ) from None
    supported = FigureCanvasAgg.get_supported_filetypes()
    if target.suffix[1:].lower() not in supported:
        endings = ", ".join(f".{ending}" for ending in sorted(supported))
        raise RematError(f"cannot draw into {str(target)!r}; its ending must be one of {endings}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder of {str(target)!r} does not exist")


def plot_tradeoff(curve: Tradeoff, path: str | os.PathLike[str]) -> None:
    """Draw overhead against budget, with the bound, into a file (`.png`, `.svg`, `.pdf`).

    Raises:
        RematError: if matplotlib is missing, or writes no such files.
        OSError: if the folder does not exist or cannot be written.
    """
    check_picture(path)
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()

    def line(times: Mapping[int, float], **style: Any) -> None:
        shares = [budget / max(1, curve.store_all_peak_bytes) for budget in times]
        axes.plot(shares, [100 * curve.overhead(time) for time in times.values()], **style)

    found_times = {p.budget_bytes: p.solution.time for p in curve.points if p.solution is not None}
    proved = {p.budget_bytes: p.lower_bound for p in curve.points if p.lower_bound is not None}
    # A schedule serves every larger budget, a bound holds at every smaller one.
    line(found_times, color="C0", marker="o", drawstyle="steps-post", label="found")
    line(proved, color="0.45", marker="v", drawstyle="steps-pre", label="no schedule is below")
    least = curve.least_bytes / max(1, curve.store_all_peak_bytes)
    axes.axvspan(0, least, color="0.9", linewidth=0, label="nothing fits, proved")
    axes.set_xlim(0, None)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("budget, of storing everything")
    axes.set_ylabel("overhead, %")
    axes.grid(color="0.92", linewidth=0.6)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:].lower(), dpi=120)
    write_atomically(path, picture.getvalue())
