"""Tables of README and docs, made of `benchmarks/results`, and checked against them.

A table stands in a page between the comments `<!-- name -->` and `<!-- end of name -->`; the names
are those of `page_tables.TABLES`. Pages are the root's, those of docs and the packages'.

    python benchmarks/tables.py            writes all anew
    python benchmarks/tables.py --check    changes nothing; exit code 1 if a page is not up to date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from page_tables import TABLES
from remat_graph import write_atomically

__all__ = ["differing", "named_in", "pages", "renewed"]

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"<!-- ([\w.-]+) -->\n(.*?)\n?<!-- end of \1 -->", re.DOTALL)


def pages() -> list[Path]:
    """List the pages that may hold tables."""
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted(ROOT.glob("docs/*.md")),
        *sorted(ROOT.glob("packages/*/README.md")),
    ]


def named_in(text: str) -> list[str]:
    """Name the tables of a page."""
    return [found[1] for found in TABLE.finditer(text)]


def renewed(text: str) -> str:
    """Make the tables of a page anew.

    Raises:
        KeyError: if there is no table of a name.
    """

    def make(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- {name} -->\n{TABLES[name]()}\n<!-- end of {name} -->"

    return TABLE.sub(make, text)


def differing() -> Iterator[tuple[Path, str]]:
    """Give each page that is not up to date, and what it should be."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        fresh = renewed(text)
        if fresh != text:
            yield page, fresh


def main() -> int:
    """Write the tables, or check them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    stale = list(differing())
    for page, text in stale:
        print(f"{page.relative_to(ROOT)}: {'differs' if options.check else 'written'}")
        if not options.check:
            write_atomically(page, text)
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
