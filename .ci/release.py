"""Release every package whose version has no tag yet: build, check, list licences, tag.

Distributions go to `dist`, with the licences of what they need; the commit that is checked out gets
one tag for each package, such as `remat-graph-v0.1.0`. Nothing is pushed or uploaded. A working
tree with changes is refused, and so is, but for a dry run, a version that the CHANGELOG calls
unreleased.

    python .ci/release.py [--dry-run]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


class Refused(Exception):
    """Why nothing is released."""


@dataclass(frozen=True, slots=True)
class Release:
    """A package at a version that has no tag yet."""

    folder: Path
    version: str

    @property
    def tag(self) -> str:
        """The name of its tag."""
        return f"{self.folder.name}-v{self.version}"

    @property
    def is_dated(self) -> bool:
        """Whether the CHANGELOG says when the version was released."""
        changes = (self.folder / "CHANGELOG.md").read_text(encoding="utf-8")
        heading = rf"^## {re.escape(self.version)} - \d{{4}}-\d\d-\d\d$"
        return re.search(heading, changes, re.MULTILINE) is not None


def git(root: Path, *arguments: str) -> str:
    """Run git, and give what it prints."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def pending(root: Path) -> list[Release]:
    """List what has no tag yet.

    Raises:
        Refused: if the working tree has changes, or a package no version.
    """
    changed = git(root, "status", "--porcelain")
    if changed:
        raise Refused(f"the working tree has changes; commit or remove them first:\n{changed}")
    tags = set(git(root, "tag", "--list").splitlines())
    releases = []
    for about in sorted(root.glob("packages/*/src/*/__about__.py")):
        version = VERSION.search(about.read_text(encoding="utf-8"))
        if version is None:
            raise Refused(f'{about.relative_to(root)} has no line __version__ = "..."')
        releases.append(Release(about.parents[2], version[1]))
    return [release for release in releases if release.tag not in tags]


def build(releases: list[Release]) -> None:
    """Build and check the distributions, and list the licences of what they need."""
    output = ROOT / "dist"
    shutil.rmtree(output, ignore_errors=True)
    for release in releases:
        command = [sys.executable, "-m", "hatchling", "build", "--directory", str(output)]
        subprocess.run(command, cwd=release.folder, check=True)
    distributions = sorted(map(str, output.iterdir()))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *distributions], check=True)
    licences = [sys.executable, str(ROOT / ".ci" / "licences.py")]
    subprocess.run([*licences, "--output", str(output / "LICENCES.md")], check=True)


def check_dates(releases: list[Release]) -> None:
    """Look for the dates of releases.

    Raises:
        Refused: if a CHANGELOG does not say when its version was released.
    """
    undated = [release.tag for release in releases if not release.is_dated]
    if undated:
        raise Refused(
            f"no date in the CHANGELOG for {', '.join(undated)}; write '## VERSION - YYYY-MM-DD'"
        )


def tag(root: Path, releases: list[Release]) -> None:
    """Tag the commit that is checked out."""
    for release in releases:
        git(root, "tag", "--annotate", release.tag, "--message", release.tag)


def main() -> int:
    """Release what is pending; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="build and check; no tags")
    options = parser.parse_args()
    try:
        releases = pending(ROOT)
        if not releases:
            print("every version has its tag; nothing to release")
            return 0
        if not options.dry_run:
            check_dates(releases)
        build(releases)
        if not options.dry_run:
            tag(ROOT, releases)
    except Refused as reason:
        print(f"refused: {reason}", file=sys.stderr)
        return 1
    for release in releases:
        note = "" if release.is_dated else " (the CHANGELOG has no date for it)"
        print(f"{'would tag' if options.dry_run else 'tagged'} {release.tag}{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
