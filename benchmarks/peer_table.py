"""Rows of the side-by-side benchmark: kept in a file, printed, and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from provenance import commit, provenance
from remat_graph import write_atomically

__all__ = ["COMPILED_BLOCKS", "Record", "Records", "markdown", "outcome", "print_records", "shown"]

Record = dict[str, Any]
COMPILED_BLOCKS = "inductor checkpoint per block"
KEY = ("model", "threads", "variant", "against")
TITLES = {
    "gpt2-no-dropout": "GPT-2, 12 layers",
    "unet": "U-Net",
    "transformer-no-dropout": "nn.Transformer 6-6",
    "llama": "Llama, 32,000 words",
    "vit": "ViT",
}


class Records:
    """The rows that are known, in a file that is always whole; without a path they are not kept."""

    def __init__(
        self, path: Path | None, *, keep: Literal["none", "all", "of this commit"] | str
    ) -> None:
        """Read the rows to keep.

        Raises:
            SystemExit: if the file has no rows.
        """
        self._path = path
        self._about = provenance(("remat", "torch"))
        self._rows: dict[tuple[Any, ...], Record] = {}
        if path is None or keep == "none" or not path.exists():
            return
        content = json.loads(path.read_text(encoding="utf-8"))
        if "rows" not in content:
            raise SystemExit(f"{path} is not a file of these rows; --fresh writes it anew")
        for row in content["rows"]:
            if keep == "all" or row["commit"] == commit():
                self._rows[_key(row)] = row

    def all(self) -> list[Record]:
        """List all rows, in the order in which they were measured."""
        return list(self._rows.values())

    def has(self, key: Mapping[str, Any]) -> bool:
        """Tell whether a row is known and has not failed."""
        row = self._rows.get(_key(key))
        return row is not None and "error" not in row

    def get(self, key: Mapping[str, Any]) -> Record:
        """Give a row.

        Raises:
            KeyError: if it is not known.
        """
        return self._rows[_key(key)]

    def add(self, row: Record) -> None:
        """Keep a row, and write all."""
        self._rows[_key(row)] = {
            **row,
            "commit": self._about["commit"],
            "date": self._about["date"],
        }
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = {"machine": self._about, "rows": self.all()}
            write_atomically(self._path, json.dumps(content, indent=1) + "\n")


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def outcome(row: Record) -> str:
    """Say how a row of remat beside a peer came out."""
    if "error" in row:
        return "failed"
    if "out_of_reach" in row or row["peak_ratio"] > 1:
        return "out of reach"
    first, third = row["quartiles"]
    if first <= 1 <= third:
        return "level"
    return "faster" if row["time_ratio"] < 1 else "slower"


def shown(row: Record) -> str:
    """Describe a row in one line."""
    against = "" if row["against"] == "plain" else f" at the peak of {row['against']}"
    name = f"{row['variant']}{against}"
    if "error" in row:
        return f"{name}: failed: {row['error'][:200]}"
    if "out_of_reach" in row:
        return f"{name}: out of reach: {row['out_of_reach'][:120]}"
    first, third = row["quartiles"]
    verdict = "" if row["against"] == "plain" else f", {outcome(row)}"
    return (
        f"{name}: peak {row['one']['peak_bytes'] / 2**20:.2f} MiB, {row['peak_ratio']:.3f}; "
        f"time {row['one']['seconds'] * 1e3:.1f} ms, {row['time_ratio']:.3f} "
        f"({first:.3f}-{third:.3f}){verdict}; set up in {row['one']['setup_seconds']:.0f} s; "
        f"gradients {row['gradient_error']:.0e}"
    )


def print_records(rows: Sequence[Record]) -> None:
    """Print a table for each model and number of threads."""
    for model, threads in dict.fromkeys((row["model"], row["threads"]) for row in rows):
        print(f"\n{model}, {threads} threads: peak and time of plain, or of the peer")
        for row in rows:
            if (row["model"], row["threads"]) == (model, threads):
                print(f"  {shown(row)}")
    for name, of_these in _by_kernels(rows):
        print(f"\nbeside the peers at their peaks, {name}: {_verdicts(of_these)[0]}")


def markdown(rows: Sequence[Record]) -> str:
    """Make Markdown tables, one for each number of threads, and a line on what is lost."""
    parts = [_table(rows, threads) for threads in sorted({row["threads"] for row in rows})]
    for name, of_these in _by_kernels(rows):
        counts, lost = _verdicts(of_these)
        parts.append(
            f"`remat` with {name} at the peers' own peaks, or below: {counts}. Not faster: {lost}."
        )
    return "\n\n".join(parts)


def _table(rows: Sequence[Record], threads: int) -> str:
    of_these = [row for row in rows if row["threads"] == threads]
    models = [model for model in TITLES if any(row["model"] == model for row in of_these)]
    beside_plain = [row for row in of_these if row["against"] == "plain"]
    found = {_key(row): row for row in of_these}
    count = "one thread" if threads == 1 else f"{threads} threads"
    lines = [
        f"| peak / time of plain eager, {count} | {' | '.join(TITLES[m] for m in models)} |",
        "|---" * (1 + len(models)) + "|",
    ]
    for variant in dict.fromkeys(row["variant"] for row in beside_plain):
        texts = [
            _text(
                found.get((model, threads, variant, "plain")),
                found.get((model, threads, "remat", variant)),
                found.get((model, threads, "remat compiled", variant)),
            )
            for model in models
        ]
        lines.append(f"| {_title(variant)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _title(variant: str) -> str:
    name, _, setting = variant.partition(" ")
    if variant.startswith("remat compiled"):
        return f"**`remat`**, compiled groups, budget {setting.partition(' ')[2]}"
    if name == "remat":
        return f"**`remat`**, budget {setting}"
    if variant == COMPILED_BLOCKS:
        return "`torch.compile`, inductor, checkpoint per block"
    if name in ("aot_eager", "inductor"):
        return f"`torch.compile`, {name}, `activation_memory_budget` {setting}"
    return variant


def _text(row: Record | None, beside: Record | None, compiled: Record | None) -> str:
    if row is None:
        return "not measured"
    if "error" in row:
        return f"failed: {row['error'][:60]}"
    if "out_of_reach" in row:
        return "out of reach"
    text = f"{row['peak_ratio']:.2f} / {row['time_ratio']:.2f}"
    ours = [f"`remat` there {_beside(beside)}"] if beside is not None else []
    ours += [f"compiled {_beside(compiled)}"] if compiled is not None else []
    return "; ".join([text, *ours])


def _beside(row: Record) -> str:
    ratio = f" {row['time_ratio']:.2f}" if "time_ratio" in row else ""
    return f"{outcome(row)}{ratio}"


def _by_kernels(rows: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Part rows beside peers by what remat runs."""
    beside = [row for row in rows if row["against"] != "plain"]
    parts = [
        (name, [row for row in beside if row["variant"] == variant])
        for variant, name in (("remat", "eager kernels"), ("remat compiled", "compiled groups"))
    ]
    return [(name, part) for name, part in parts if part]


def _verdicts(rows: Sequence[Record]) -> tuple[str, str]:
    """Count the outcomes beside peers, and name all that are not faster, the worst first."""
    beside, outcomes = rows, [outcome(row) for row in rows]
    names = [name for name in ("faster", "level", "slower", "out of reach", "failed")
             if name in outcomes]  # fmt: skip
    counts = ", ".join(f"{outcomes.count(name)} of {len(beside)} {name}" for name in names)
    lost = sorted(
        (row for row in beside if outcome(row) != "faster"),
        key=lambda row: -row.get("time_ratio", float("inf")),
    )
    texts = [
        f"{TITLES.get(row['model'], row['model'])} beside {row['against']} with "
        f"{row['threads']} thread{'s' * (row['threads'] > 1)}, {outcome(row)}"
        + (f" {row['time_ratio']:.2f}" if "time_ratio" in row else "")
        for row in lost
    ]
    return counts or "none measured", "; ".join(texts) or "none"
