"""The table of README: one figure for each claim, the rest is in docs/figures.md."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable

from matrix import RIGHT, counted
from page_tables.reading import markdown, results, spread
from page_tables.solving import cells_by_task, overhead
from page_tables.training import peaks_of_loops, wrong_or_over
from peer_table import outcome

__all__ = ["TABLES"]

SAME_POINTS = 0.1  # where `refine` stops
CLOSE_POINTS = 0.2


def figures() -> str:
    """Make the table of README."""
    return markdown(("what", "figure"), [row for part in PARTS for row in part()])


def _architectures() -> list[tuple[str, str]]:
    cases = results("matrix")["cases"]
    counts = Counter(case["category"] for case in cases)
    right = sum(counts[name] for name in RIGHT)
    return [(
        "tiny architectures of transformers and timm, and modules of `torch.nn`, at 0.6 of plain's "
        "peak or the least that fits ([which](docs/matrix.md))",
        f"{right} of {len(counted(cases))} train right; {wrong_or_over(counts)} wrong or over "
        f"budget, {counts['refused']} refused, {counts['as compiled']} differ from eager as under "
        f"any `torch.compile`",
    )]  # fmt: skip


def _wild() -> list[tuple[str, str]]:
    cases = results("wild")["cases"]
    counts = Counter(case["category"] for case in cases)
    right = sum(counts[name] for name in RIGHT)
    packages = {case["name"].partition("/")[0] for case in cases}
    return [(
        f"tiny models of {len(packages)} other packages, such as diffusers, MONAI and "
        f"torch_geometric, likewise ([which](docs/wild.md))",
        f"{right} of {len(counted(cases))} train right; {wrong_or_over(counts)} wrong or over "
        f"budget without a word, {counts['refused']} refused",
    )]  # fmt: skip


def _loops() -> list[tuple[str, str]]:
    rows = results("loops")["loops"]
    same = sum(row["difference"] == 0 for row in rows)
    apart = max(row["difference"] for row in rows)
    return [(
        "real loops: optimizers, accumulation, hooks, lengths, Trainer, Accelerate, Lightning, "
        "LoRA, DDP, FSDP2",
        f"weights bitwise plain's after {same} of {len(rows)}, else {apart:.0e} apart; measured "
        f"steps at {peaks_of_loops()} of their budget",
    )]  # fmt: skip


def _patterns() -> list[tuple[str, str]]:
    rows = results("patterns")["models"]
    over = sum(len(row["over"]) for row in rows)
    steps = sum(row["steps"] for row in rows)
    return [(
        "models whose steps differ: layers left out by chance, experts, loops over data",
        f"{over} of {steps} steps over budget, {spread((row['plans'] for row in rows), 0)} plans",
    )]  # fmt: skip


def _inner_gradients() -> list[tuple[str, str]]:
    rows = results("inner_gradients")["rows"]
    beside = [row for row in rows if row["variant"] == "remat"]
    faster = sum(outcome(row) == "faster" for row in beside)
    half = [row["time_ratio"] for row in rows if row["variant"] == "remat 0.5"]
    least = [row["peak_ratio"] for row in rows if row["variant"] == "remat, the least"]
    return [(
        "forces, a penalty on slopes, a differential equation and inner steps, whose gradients the "
        "forward computes ([more](docs/figures.md#gradients-in-the-forward))",
        f"at half of plain's peak {spread(half, 2)} of its time, the least {spread(least, 2)} of "
        f"its peak; faster at {faster} of {len(beside)} peaks of checkpoints and aot_eager",
    )]  # fmt: skip


_NUMBERS = {1: "a model", 2: "two models", 3: "three models", 4: "four models", 5: "five models"}


def _peers() -> list[tuple[str, str]]:
    rows = results("peers")["rows"]
    found = []
    for variant, compiled, what in (
        ("remat", False, "torch's own kernels"),
        ("remat", True, "Inductor, which fuses kernels"),
        ("remat compiled", True, "Inductor, and with compiled groups here"),
    ):
        beside = [
            row
            for row in rows
            if row["variant"] == variant
            and row["against"] != "plain"
            and row["against"].startswith("inductor") is compiled
        ]
        if not beside:
            continue
        peers = len({row["against"] for row in beside})
        models = len({row["model"] for row in beside})
        faster, slower = (
            [row for row in beside if outcome(row) == each] for each in ("faster", "slower")
        )
        text = f"faster at {len(faster)} of {len(beside)}"
        if slower:
            most = max(row["time_ratio"] for row in slower)
            text += f", slower at {len(slower)}, by up to {100 * (most - 1):.0f}%"
        found.append((
            f"{_NUMBERS[models]}, at the peak of each of {peers} settings of checkpointing or "
            f"`activation_memory_budget` with {what} ([more](docs/figures.md#beside-others))",
            text,
        ))  # fmt: skip
    return found


def _certified() -> list[tuple[str, str]]:
    cells = [row["published"] for row in results("certified")["models"].values()]
    plans = [cell for cell in cells if "overhead" in cell]
    gaps = [cell["overhead"] - cell["bound"] for cell in plans]
    close = sum(gap <= CLOSE_POINTS for gap in gaps)
    impossible = sum(cell["status"] == "infeasible" for cell in cells)
    return [(
        "planning HiRemate's twelve models at its published peaks, 60 s "
        "([more](docs/certified-plans.md))",
        f"{close} of {len(plans)} plans proved within {CLOSE_POINTS} points of the least time, "
        f"the others within {max(gaps):.2f}; {impossible} peak proved out of reach",
    )]  # fmt: skip


def _solvers() -> list[tuple[str, str]]:
    margins = []
    for task in cells_by_task().values():
        others = [overhead(cell) for name, cell in task.items() if name not in ("refine", "auto")]
        margins.append(min(others) - overhead(task["refine"]))
    slower = sum(margin < -SAME_POINTS for margin in margins)
    faster = [margin for margin in margins if margin > SAME_POINTS]
    most = max((margin for margin in faster if margin < math.inf), default=0.0)
    return [(
        "`refine` beside the best of the other solvers, 60 s each, nine models at five budgets",
        f"slower by more than {SAME_POINTS} points at {slower} of {len(margins)}, faster at "
        f"{len(faster)}, by up to {most:.1f}",
    )]  # fmt: skip


def _large() -> list[tuple[str, str]]:
    rows = results("large")["rows"]
    seven = [row for row in rows if row["layers"] == 32]
    grown = [row for row in results("growth")["rows"] if row["size"] == 10**5]
    gap = max(row["overhead"] - row["bound"] for row in grown)
    return [
        (
            "planning a Llama of 7 billion parameters without its data, half of storing everything",
            f"{spread((row['seconds'] for row in seven), 0)} s, "
            f"{max(row['peak_bytes'] for row in seven) / 2**30:.1f} GiB",
        ),
        (
            "planning graphs of 10^5 operations, one core",
            f"{spread((row['seconds'] for row in grown), 0)} s, within {gap:.3f} points of the "
            f"proved bound",
        ),
    ]


def _executor() -> list[tuple[str, str]]:
    models = results("executor")["models"].values()
    ratio = statistics.median(row["time_ratio"] for row in models)
    return [(f"storing everything beside eager, {len(models)} models", f"median time {ratio:.2f}")]


def _gpu() -> list[tuple[str, str]]:
    found = results("gpu")
    rows = [row for row in found["rows"] if row["numerics"] == "none"]
    models = {row["model"] for row in rows}
    shares = sorted({row["asked"] for row in rows}, reverse=True)
    times = [row["seconds"] / row["plain_seconds"] for row in rows]
    predicted = [1 + row["predicted_overhead"] for row in rows]
    over = [row["peak_bytes"] / row["budget_bytes"] - 1 for row in rows]
    return [(
        f"on one {found['device']['device']}: {len(models)} models of "
        f"{min(row['parameters'] for row in rows) / 1e6:.0f} to "
        f"{max(row['parameters'] for row in rows) / 1e6:.0f} million parameters at "
        f"{' and '.join(map(str, shares))} of plain's peak, or the least that fits "
        f"([more](docs/figures.md#on-a-gpu))",
        f"{min(times):.2f} to {max(times):.2f} of plain's time (predicted {min(predicted):.2f} to "
        f"{max(predicted):.2f}); {sum(each > 0 for each in over)} of {len(rows)} over the budget, "
        f"by up to {100 * max(0.0, *over):.2f}%",
    )]  # fmt: skip


PARTS: tuple[Callable[[], list[tuple[str, str]]], ...] = (
    _architectures, _wild, _loops, _patterns, _inner_gradients, _peers, _executor, _gpu,
    _certified, _solvers, _large,
)  # fmt: skip
TABLES: dict[str, Callable[[], str]] = {"figures": figures}
