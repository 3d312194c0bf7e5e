"""Tables of training with other sizes in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from page_tables.reading import markdown, percent, results

__all__ = ["TABLES"]

_TRACED = ("traced as it comes", "traced with symbols")


def sizes() -> str:
    """List the models whose sizes, or numbers, change in each step."""
    found = results("sizes")
    rows = [
        (
            name,
            *_counts(row),
            f"{row['step s'] / row['plain step s']:.2f}",
            f"{row['ratio']:.2f}",
            row["steps told over budget"],
            f"{row['largest difference']:.0e}" if row["largest difference"] else "bitwise",
        )
        for name, row in found["loops"].items()
    ]
    heading = ("model", "traced", "rehearsed", "solved", "median step, of plain's",
               "all from the 20th on", "steps over", "gradients")  # fmt: skip
    return markdown(heading, rows, "sizes")


def loops() -> str:
    """List the real loops with sizes that are drawn."""
    rows = [
        (
            row["name"],
            row["steps"],
            *_counts(row["counts"]),
            percent(row["peak_bytes"] / row["budget_bytes"]) if row["peak_bytes"] else "",
            row["error"] or ("bitwise" if not row["difference"] else f"{row['difference']:.0e}"),
        )
        for row in results("loops_sizes")["loops"]
    ]
    heading = ("loop", "steps", "traced", "rehearsed", "solved", "peak of budget",
               "difference from plain")  # fmt: skip
    return markdown(heading, rows, "loops_sizes")


def _counts(counts: Mapping[str, int]) -> tuple[int, ...]:
    traced = sum(counts.get(name, 0) for name in _TRACED)
    return traced, counts.get("rehearsed", 0), counts.get("solved", 0)


TABLES: dict[str, Callable[[], str]] = {"sizes": sizes, "loops-sizes": loops}
