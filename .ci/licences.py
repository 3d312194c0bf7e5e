"""Licences of all that our packages need, and of what that needs, by pip-licenses, as Markdown.

What is installed here for development alone is left out; extras other than torch are, too.

    python .ci/licences.py [--output FILE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(path.name for path in sorted(ROOT.glob("packages/*")))


def needed(names: tuple[str, ...]) -> list[str]:
    """List what packages need, directly or not, without themselves."""
    found: set[tuple[str, str]] = set()
    pending = [(name, "") for name in names]
    while pending:
        name, extra = pending.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                own = canonicalize_name(requirement.name)
                pending += [(own, other) for other in ("", *requirement.extras)]
    return sorted({name for name, _ in found} - set(names))


def main() -> int:
    """Print the list, or write it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    command = [sys.executable, "-m", "piplicenses", "--format=markdown", "--from=mixed"]
    command += ["--with-urls", "--packages", *needed(OURS)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if options.output is None:
        sys.stdout.write(listed)
    else:
        options.output.write_text(listed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
