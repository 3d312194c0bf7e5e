"""Does remat train it? Hundreds of architectures, each tiny, in a process of its own.

One architecture for every package of transformers, the modules of torch's own tests, and families
of timm, if it is installed (`hatch run timm`). Each model is built from its configuration with
random weights and handed to `remat.rematerialize` before it was ever called, with six tenths of
plain autograd's peak as the budget, or the least that remat names if that is too small. Three steps
of training must compute what plain eager computes, and the bits of storing everything, within the
budget.

| category | |
|---|---|
| right, rounding | within 1e-5, or 1e-3, of eager's gradients, buffers, largest loss; those bits |
| WRONG | no exception, and further from eager |
| not bitwise | close to eager, but not the bits of storing everything |
| as compiled | eager differs; `torch.compile` by `eager` or `aot_eager` gives what remat gives |
| OVER | no exception, and a step took more than the budget without a word |
| told over | it did, and a warning said so |
| refused | an exception of remat's own |
| foreign | any other exception, where eager raises none |
| timeout, crash | the process was too slow, or died |
| unstable in eager, not runnable | not counted: eager differs from itself, or fails |
| one size | not counted: no other size of its inputs runs in eager; with `--sizes` alone |

Results are kept case by case in a file. A run goes on where the last one stopped, if that was on
the same commit and had not finished or `--resume` is given; `--fresh` starts anew. Exit code 1 if
less than 98% are right, or any is WRONG, not bitwise, OVER or foreign.

    python benchmarks/matrix.py [--only PATTERN] [--kind transformers|modules|timm] [--jobs N]
        [--resume] [--fresh] [--eager-only] [--kernels inductor] [--sizes] [--draw N] [--seed N]
        [--json FILE] [--timeout S] [--threads N]

With `--kernels inductor` all operators are in compiled groups that can be, and rounding may differ
from storing everything. What differs from eager by more is trained again in double precision, where
each step may by 1e-10, or ten times what weights that are changed by a last bit lead to, and by
1e-5 at most (`matrix_cases/conditioning.py`). With `--sizes` each of ten steps has inputs of
another size, drawn by `--seed`: batches, lengths, and whatever else eager can run with. The budget
is that share of plain's peak at the largest size so far, and each step is measured. `--draw` takes
so many of the cases, by chance: always the same ones for a `--seed`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import functools
import gc
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from provenance import as_json, provenance
from remat_graph import write_atomically

SCRIPT = Path(__file__)
RESULTS = Path(__file__).parent / "results"
RIGHT = ("right", "rounding")
NOT_COUNTED = ("unstable in eager", "not runnable", "one size")
NEVER = ("WRONG", "not bitwise", "OVER", "foreign")
LEAST_RIGHT = 0.98
EAGER_BATCH = 40  # cases of one process with --eager-only
Record = dict[str, Any]


def work(options: argparse.Namespace) -> None:
    """Run cases in this process, and append the outcome of each to a file as it is known."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch  # noqa: PLC0415

    import matrix_cases  # noqa: PLC0415

    cases = _cases(options.suite)
    torch.set_num_threads(options.threads)
    gc.collect()
    gc.freeze()  # each peak is measured after a collection, which is shorter without what is here
    run: Callable[[matrix_cases.Case], matrix_cases.Outcome] = matrix_cases.judge_eager
    if not options.eager_only:
        seed = options.seed if options.sizes else None
        groups = options.kernels == "inductor"
        run = functools.partial(matrix_cases.judge, groups=groups, seed=seed)
    for name in options.work:
        outcome = run(cases.find(name))
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **outcome.facts()}) + "\n")


def _cases(suite: str) -> Any:
    return importlib.import_module(f"{suite}_cases")  # which imports torch


def start(names: Sequence[str], options: argparse.Namespace) -> list[Record]:
    """Run cases in one new process; those after one that killed it are run in another."""
    done: list[Record] = []
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "outcomes.jsonl"
            ending = _process(left, output, options)
            lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
        done += [json.loads(line) for line in lines]
        left = left[len(lines) :]
        if left:
            category, reason = ending or ("crash", "it ended without an outcome")
            done.append({"name": left.pop(0), "category": category, "reason": reason})
    return done


def _process(
    names: Sequence[str], output: Path, options: argparse.Namespace
) -> tuple[str, str] | None:
    command = [
        sys.executable,
        str(SCRIPT.with_stem(options.suite)),
        "--work",
        *names,
        "--output",
        str(output),
    ]
    command += ["--threads", str(options.threads), "--seed", str(options.seed)]
    command += ["--eager-only"] * options.eager_only + ["--sizes"] * options.sizes
    command += ["--kernels", options.kernels]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        errors="replace",
    ) as process:
        try:
            _, printed = process.communicate(timeout=options.timeout * (1 + len(names) // 8))
        except subprocess.TimeoutExpired:
            return "timeout", f"{options.timeout:.0f} s"
        finally:
            _kill(process)
    if process.returncode == 0:
        return None
    if process.returncode < 0:
        return "crash", signal.Signals(-process.returncode).name
    last = [line for line in printed.splitlines() if line.strip()][-1:]
    return "crash", "".join(last)[:400] or f"exit code {process.returncode}"


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process that was started here, and whatever it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def machine(options: argparse.Namespace) -> Record:
    """Describe what the results were made on."""
    return {
        **provenance(("remat", "torch", *_cases(options.suite).PACKAGES)),
        "threads": options.threads,
        **({"seed": options.seed} if options.sizes else {}),
    }


class Results:
    """What is known so far, in a file that is always whole."""

    def __init__(self, path: Path, about: Record, *, keep: bool) -> None:
        self.path = path
        self.about = about
        self.records: dict[str, Record] = {}
        if keep and path.exists():
            for record in json.loads(path.read_text(encoding="utf-8"))["cases"]:
                self.records[record["name"]] = record

    def add(self, records: Iterable[Record]) -> None:
        """Keep outcomes, and write all."""
        for record in records:
            self.records[record["name"]] = {**record, "commit": self.about["commit"]}
        content = {
            "machine": self.about,
            "summary": summary(self.records.values()),
            "cases": [self.records[name] for name in sorted(self.records)],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, as_json(content))


def summary(records: Iterable[Record]) -> dict[str, dict[str, int]]:
    """Count categories by kind."""
    found: dict[str, Counter[str]] = {}
    for record in records:
        kind = record["name"].partition("/")[0]
        found.setdefault(kind, Counter())[record["category"]] += 1
    return {kind: dict(counts) for kind, counts in sorted(found.items())}


def counted(records: Iterable[Record]) -> list[Record]:
    """Leave out what eager cannot do itself."""
    return [record for record in records if record["category"] not in NOT_COUNTED]


def share_right(records: Iterable[Record], right: Sequence[str] = RIGHT) -> float:
    """Tell the share of right ones of those that count."""
    rows = counted(records)
    return sum(row["category"] in right for row in rows) / len(rows) if rows else 0.0


def table(records: Sequence[Record]) -> list[list[str]]:
    """Make the table of counts, with a heading and a row of sums."""
    counts = summary(records)
    present = {category for kind in counts.values() for category in kind}
    order = [
        *RIGHT,
        "as compiled",
        *NEVER,
        "told over",
        "refused",
        "timeout",
        "crash",
        *NOT_COUNTED,
    ]
    columns = [category for category in order if category in present]
    rows = [["", "counted", "right", *columns]]
    for kind in [*counts, "all"]:
        these = [r for r in records if kind == "all" or r["name"].startswith(f"{kind}/")]
        of_kind = Counter(record["category"] for record in these)
        rows.append(
            [kind, str(len(counted(these))), f"{100 * share_right(these):.1f}%"]
            + [str(of_kind[column]) for column in columns]
        )
    rows[0][2] = "of them right"
    return rows


def print_report(records: Sequence[Record]) -> None:
    """Print everything that is not right, and the counts."""
    for record in sorted(records, key=lambda r: (r["category"], r["name"])):
        if record["category"] not in RIGHT:
            variant = f" ({record['variant']})" if record.get("variant") else ""
            reason = record.get("reason", "")
            print(f"{record['category']:18} {record['name']}{variant}: {reason[:200]}")
    rows = table(records)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    bitwise = sum(record.get("bitwise") is True for record in records)
    least = sum(bool(record.get("least")) and record["category"] in RIGHT for record in records)
    print(f"\nthe bits of storing everything: {bitwise}; at the least budget named: {least}")


def read_options(suite: str) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=f"Train the models of {suite}_cases.")
    parser.set_defaults(suite=suite)
    parser.add_argument("--only", metavar="PATTERN", help="such as 'transformers/*bert*' or gpt2")
    parser.add_argument("--kind", help="transformers, modules or timm; or a package")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--resume", action="store_true", help="keep what is in the file")
    parser.add_argument("--fresh", action="store_true", help="drop what is in the file")
    parser.add_argument("--eager-only", action="store_true", help="build, and train in eager")
    parser.add_argument("--kernels", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--sizes", action="store_true", help="other sizes in each step")
    parser.add_argument("--draw", type=int, metavar="N", help="so many of the cases, by chance")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are kept")
    parser.add_argument("--timeout", type=float, default=240.0, metavar="S", help="for each case")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def select(options: argparse.Namespace) -> list[str]:
    """List the cases that are asked for."""
    cases = _cases(options.suite)
    kinds = [options.kind] if options.kind else cases.KINDS
    found = [name for kind in kinds for name in cases.names(kind)]
    patterns = options.only.split(",") if options.only else ["*"]
    chosen = [
        name
        for name in found
        if any(
            fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name.partition("/")[2], pattern)
            for pattern in patterns
        )
    ]
    if options.draw is None or options.draw >= len(chosen):
        return chosen
    return random.Random(options.seed).sample(chosen, options.draw)


def main(suite: str = "matrix", right: Sequence[str] = RIGHT) -> int:
    """Run the cases of a suite that are not known yet; return the exit code.

    It is 1 if fewer are in the categories `right` than is asked for.
    """
    options = read_options(suite)
    if options.work:
        work(options)
        return 0
    parts = [suite, *["eager"] * options.eager_only, *["sizes"] * options.sizes]
    parts += [options.kernels] * (options.kernels != "eager")
    about = machine(options)
    path = options.json or RESULTS / f"{'_'.join(parts)}.json"
    results = Results(path, about, keep=not options.fresh)
    chosen = select(options)
    pending = [
        name
        for name in chosen
        if name not in results.records
        or not (options.resume or results.records[name].get("commit") == about["commit"])
    ]
    size = EAGER_BATCH if options.eager_only else 1
    batches = [pending[first : first + size] for first in range(0, len(pending), size)]
    print(f"{len(chosen)} cases, {len(chosen) - len(pending)} of them known", flush=True)
    finished = len(chosen) - len(pending)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for task in concurrent.futures.as_completed(
            [pool.submit(start, batch, options) for batch in batches]
        ):
            records = task.result()
            results.add(records)
            for record in records:
                finished += 1
                shown = f"{record['category']}  {record.get('reason', '')[:120]}"
                print(f"{finished:4}/{len(chosen)}  {record['name']:44}{shown}", flush=True)
    records = [results.records[name] for name in chosen]
    print_report(records)
    if options.eager_only:
        return 0
    bad = any(record["category"] in NEVER for record in records)
    return int(bad or share_right(records, right) < LEAST_RIGHT)


if __name__ == "__main__":
    sys.exit(main())
