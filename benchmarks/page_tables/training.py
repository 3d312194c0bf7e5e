"""Tables of what was trained: peaks, times and gradients beside plain autograd and beside peers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import matrix
import peer_table
from page_tables.reading import Row, markdown, mib, percent, results, source, spread

__all__ = ["TABLES", "peaks_of_loops", "wrong_or_over"]

LOSSES = {
    "none": "as they are",
    "bitwise": "the same bits",
    "rounding": "other layouts, too",
    "lossy": "copies in 16 bits, too",
}


def peers() -> str:
    """Put remat beside what a user would pick instead."""
    return f"{peer_table.markdown(results('peers')['rows'])}\n\n{source('peers')}"


def loops() -> str:
    """List the real loops."""
    rows = [
        (
            row["name"],
            row["steps"],
            row["plans"],
            percent(row["peak_bytes"] / row["budget_bytes"]) if row["peak_bytes"] else "",
            row["error"] or ("bitwise" if not row["difference"] else f"{row['difference']:.0e}"),
        )
        for row in results("loops")["loops"]
    ]
    heading = ("loop", "steps", "plans", "peak of budget", "difference from plain")
    return markdown(heading, rows, "loops")


def _time(row: Row) -> str:
    """Write a time ratio with its quartiles."""
    first, third = row["quartiles"]
    return f"{row['time_ratio']:.2f} ({first:.2f} to {third:.2f})"


def inner_gradients() -> str:
    """Put models whose forward computes gradients beside what a user would pick instead."""
    rows = results("inner_gradients")["rows"]
    ours = {(row["model"], row["against"]): row for row in rows if row["variant"] == "remat"}
    found = [
        (
            row["model"],
            row["variant"],
            f"{row['peak_ratio']:.3f}",
            _time(row),
            _time(ours[key]) if (key := (row["model"], row["variant"])) in ours else "",
        )
        for row in rows
        if row["variant"] != "remat"
    ]
    heading = ("model", "", "peak of plain", "time of plain", "remat at this peak, its time of it")
    return markdown(heading, found, "inner_gradients")


def patterns() -> str:
    """List the models whose steps differ."""
    rows = [
        (
            row["model"],
            row["about"],
            row["plans"],
            f"{row['budget_bytes'] / row['plain_peak_bytes']:.2f}",
            len(row["over"]),
            "bitwise" if not row["unequal"] else f"{row['error']:.0e}",
        )
        for row in results("patterns")["models"]
    ]
    heading = ("model", "what differs", "plans", "budget of plain", "steps over", "difference")
    return markdown(heading, rows, "patterns")


def executor() -> str:
    """Put generated code that stores everything beside eager."""
    found = results("executor")
    rows = [
        (
            name,
            f"{row['one']['peak_bytes'] / row['other']['peak_bytes']:.2f}",
            f"{row['time_ratio']:.2f}",
        )
        for name, row in found["models"].items()
    ]
    rows.append(("median", "", f"{found['median_time_ratio']:.2f}"))
    return markdown(("model", "peak of eager's", "time of eager's"), rows, "executor")


def gpu() -> str:
    """List steps on a GPU by a plan, beside plain autograd."""
    found = results("gpu")
    rows = [
        (
            f"{row['model']}, {row['parameters'] / 1e6:.0f}M parameters",
            f"{row['asked']}{' (the least)' * row['refused']}",
            LOSSES[row["numerics"]],
            f"{row['budget_bytes'] / row['plain_peak_bytes']:.2f}",
            percent(row["peak_bytes"] / row["budget_bytes"], 2),
            f"{row['seconds'] / row['plain_seconds']:.2f}",
            f"{1 + row['predicted_overhead']:.2f}",
            f"{row['difference']:.0e}" if row["difference"] else "bitwise",
        )
        for row in found["rows"]
    ]
    heading = ("model", "asked", "operators", "budget of plain's peak", "peak of budget",
               "time of plain", "predicted", "gradients")  # fmt: skip
    left_out = f" Not measured: {', '.join(found['left_out'])}." if found["left_out"] else ""
    return f"{markdown(heading, rows, 'gpu')} On one {found['device']['device']}.{left_out}"


def floor() -> str:
    """Put slices beside slices by hand, and beside compilers."""
    content = results("floor")["rows"]
    models = list(dict.fromkeys(row["model"] for row in content))
    content.sort(key=lambda row: models.index(row["model"]))
    ours = {(row["model"], row["against"], row["variant"]): row for row in content}
    rows = [
        (
            row["model"],
            row["variant"].replace("remat", "**`remat`**"),
            _peak_and_time(row),
            "" if "beyond" not in row else f"{row['beyond']:.3f}",
            _peak_and_time(ours.get((row["model"], row["variant"], "remat"), {})),
            _peak_and_time(ours.get((row["model"], row["variant"], "remat compiled"), {})),
        )
        for row in content
        if row["against"] == "plain"
    ]
    heading = ("model", "variant", "peak / time of plain", "beyond gradients, of plain's",
               "`remat` at its peak: peak / time of it", "compiled")  # fmt: skip
    return markdown(heading, rows, "floor")


def _peak_and_time(row: Row) -> str:
    if "error" in row:
        return f"failed: {row['error'][:60]}"
    if "out_of_reach" in row:
        return "out of reach"
    return f"{row['peak_ratio']:.3f} / {row['time_ratio']:.2f}" if row else ""


def dry_floor() -> str:
    """List the least budgets of large models on a device that is not there."""
    rows = [
        (row["model"], row["way"], *(f"{row[key] / 2**30:.2f}" for key in ("smallest", "least")))
        for row in results("dry_floor")["rows"]
        if "error" not in row
    ]
    heading = ("model", "way", "least budget found, GiB", "none below, GiB")
    return markdown(heading, rows, "dry_floor")


def slices() -> str:
    """List architectures that were trained in slices."""
    rows = [
        (
            row["model"],
            f"{row['plain_bytes'] / 2**20:.1f}",
            *(f"{row[key] / row['plain_bytes']:.3f}"
              for key in ("least_bytes", "least_in_slices_bytes")),
            percent(row["peak_bytes"] / row["budget_bytes"]),
            f"{row['apart']:.0e}",
        )
        for row in results("slices")["rows"]
        if "error" not in row
    ]  # fmt: skip
    heading = ("architecture", "plain, MiB", "least of plain", "in slices",
               "peak of budget", "losses apart")  # fmt: skip
    return markdown(heading, rows, "slices")


def estimates() -> str:
    """Compare what is estimated without a GPU with what was measured on one."""
    rows = [
        (
            row["model"],
            mib(row["measured_peak_bytes"]),
            f"{row['peak_bytes'] / row['measured_peak_bytes']:.2f}",
            f"{1e3 * row['measured_seconds']:.1f}",
            *(
                f"{row[f'{way}seconds'] / row['measured_seconds']:.2f}"
                for way in ("by_data_sheet_", "", "by_others_")
            ),
        )
        for row in results("estimates")["rows"]
    ]
    heading = ("model", "plain's peak", "estimated, of it", "plain's time, ms",
               "estimated, of it, by the data sheet", "by the fit",
               "by a fit to the others")  # fmt: skip
    return markdown(heading, rows, "estimates")


def regions() -> str:
    """Compare models planned whole and by blocks."""
    rows = []
    for row in results("regions")["regions"]:
        cells = [_overhead(row[kind]) for kind in ("whole", "blocks")]
        rows.append((row["model"], row["share"], f"{row['of_plain']:.2f}", *cells))
    heading = ("model", "asked", "budget of plain", "whole", "by blocks")
    return markdown(heading, rows, "regions")


def _overhead(found: Row) -> str:
    if "smallest_bytes" in found:
        return f"needs {mib(found['smallest_bytes'])}"
    return f"{100 * found['predicted_overhead']:.1f} ({100 * (found['bound_overhead'] or 0):.1f})"


def lengths() -> str:
    """Say what changing lengths and checks of calls take."""
    found = results("regions")
    told = found["lengths"]
    rows = [
        (f"{told['steps']} steps of {told['lengths']} lengths: solved", told["solved"]),
        ("plans after the first pass", told["later_plans"]),
        ("resident memory grown after it, MiB", f"{told['grown_mib']:.1f}"),
        ("checking a call of a 12-layer GPT-2, ms", f"{1e3 * found['check_seconds']:.2f}"),
    ]
    return markdown(("", ""), rows, "regions")


def alternatives() -> str:
    """Compare plans that may choose how values are made."""
    rows = [
        (
            cell["model"],
            LOSSES[cell["numerics"]],
            f"{cell['peak_ratio']:.2f}",
            f"{cell['time_ratio']:.2f} ({cell['quartiles'][0]:.2f} to {cell['quartiles'][1]:.2f})",
            f"{100 * cell['predicted_overhead']:.1f} ({100 * cell['bound_overhead']:.1f})",
            f"{cell['gradient_error']:.0e}" if cell["gradient_error"] else "bitwise",
        )
        for cell in results("alternatives")["cells"]
    ]
    heading = ("model", "operators", "peak of plain", "time of plain (quartiles)",
               "predicted overhead (bound), points", "gradients")  # fmt: skip
    return markdown(heading, rows, "alternatives")


def wrong_or_over(counts: Counter[str]) -> int:
    """Count what may never happen."""
    return sum(counts[category] for category in matrix.NEVER)


def matrix_counts(suite: str) -> str:
    """Count right and other cases of a run of the matrix."""
    heading, *rows = matrix.table(results(suite)["cases"])
    return markdown(heading, rows, suite)


def not_right(suite: str) -> str:
    """List the cases that count and are not right."""
    return _cases(suite, lambda category: category not in (*matrix.RIGHT, *matrix.NOT_COUNTED))


def matrix_not_counted() -> str:
    """List the cases that eager cannot do itself."""
    return _cases("matrix", lambda category: category in matrix.NOT_COUNTED)


def matrix_names(suite: str, category: str) -> str:
    """Name the cases of a category."""
    names = sorted(row["name"] for row in results(suite)["cases"] if row["category"] == category)
    return ", ".join(names) or "none"


def _cases(suite: str, chosen: Callable[[str], bool]) -> str:
    cases = sorted(results(suite)["cases"], key=lambda case: (case["category"], case["name"]))
    rows = [
        (case["name"], case["category"], _quoted(case.get("reason", "")[:200]))
        for case in cases
        if chosen(case["category"])
    ]
    return markdown(("case", "category", "reason"), rows) if rows else "None."


def _quoted(text: str) -> str:
    return text.replace("|", "\\|").replace("[", "\\[").replace("]", "\\]")


def matrix_right() -> str:
    """Name the cases that are right."""
    cases = results("matrix")["cases"]
    names = sorted(case["name"] for case in cases if case["category"] in matrix.RIGHT)
    return ", ".join(names) or "none"


def wild() -> str:
    """Count the models of other packages by category."""
    cases = results("wild")["cases"]
    packages = {case["name"].partition("/")[0] for case in cases}
    heading, *_, sums = matrix.table(cases)
    rows = [(f"models of {len(packages)} packages", *sums[1:])]
    return markdown(heading, rows, "wild")


def wild_right() -> str:
    """List the models of other packages that are right."""
    rows = [
        (
            *case["name"].split("/", 1),
            f"{case['budget_bytes'] / case['plain_peak_bytes']:.2f}"
            + " (the least)" * case["least"],
            percent(case["peak_bytes"] / case["budget_bytes"]),
            f"{case['error']:.0e}" if case["error"] else "bitwise",
        )
        for case in results("wild")["cases"]
        if case["category"] in matrix.RIGHT
    ]
    heading = ("package", "model", "budget of plain", "peak of budget", "difference from eager")
    return markdown(heading, rows)


def peaks_of_loops() -> str:
    """Give the least and the most share of its budget that a measured step took."""
    rows = results("loops")["loops"]
    return spread((r["peak_bytes"] / r["budget_bytes"] for r in rows if r["peak_bytes"]), 2)


def exact() -> str:
    """List the plans that may choose how values are made, and which bits differ from plain's."""
    rows = [
        (
            cell["model"],
            cell["share"],
            f"{cell['budget_bytes'] / plain:.2f}" if (plain := cell["plain_peak_bytes"]) else "",
            percent(cell["peak_bytes"] / cell["budget_bytes"]),
            cell["recomputations"],
            cell["chosen"].partition(" (")[0] or "nothing",
            "none" if not cell["different"] else len(cell["different"]),
        )
        for cell in results("exact")["cells"]
    ]
    heading = (
        "model", "asked", "budget of plain", "peak of budget", "computed again",
        "made another way", "tensors that differ",
    )  # fmt: skip
    return markdown(heading, rows, "exact")


TABLES: dict[str, Callable[[], str]] = {
    "peers": peers,
    "loops": loops,
    "inner_gradients": inner_gradients,
    "patterns": patterns,
    "executor": executor,
    "gpu": gpu,
    "floor": floor,
    "dry_floor": dry_floor,
    "slices": slices,
    "estimates": estimates,
    "regions": regions,
    "lengths": lengths,
    "alternatives": alternatives,
    "exact": exact,
    "matrix": functools.partial(matrix_counts, "matrix"),
    "matrix-not-right": functools.partial(not_right, "matrix"),
    "matrix-not-counted": matrix_not_counted,
    "matrix-sizes": functools.partial(matrix_counts, "matrix_sizes"),
    "matrix-sizes-not-right": functools.partial(not_right, "matrix_sizes"),
    "matrix-sizes-one-size": functools.partial(matrix_names, "matrix_sizes", "one size"),
    "matrix-sizes-not-runnable": functools.partial(matrix_names, "matrix_sizes", "not runnable"),
    "matrix-sizes-right": functools.partial(matrix_names, "matrix_sizes", "right"),
    "matrix-right": matrix_right,
    "wild": wild,
    "wild-not-right": functools.partial(not_right, "wild"),
    "wild-right": wild_right,
}
