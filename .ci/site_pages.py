"""A hook of MkDocs: the READMEs of packages and examples are pages, and links stay in the site.

In the repository pages link to each other, and to code, by paths. A link to a README becomes one to
its page; a link to a file that the site does not have becomes its text. A link to nothing is left
as it is, and the strict build fails on it. READMEs of packages are shown by package indexes, too,
where no such path leads anywhere: they name a page as `docs/start.md`, which is a link in the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
NAMED = re.compile(r"`((?:docs|examples)/[\w./-]+\.md)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add a page for each README."""
    for readme, uri in _readmes().items():
        files.append(File.generated(config, uri, content=readme.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages of the site, outside of blocks of code."""
    uri = page.file.src_uri
    sources = {found: readme for readme, found in _readmes().items()}
    source = sources.get(uri, DOCS / uri)
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_linked(markdown[end : fence.start()], source, uri), fence[0]]
        end = fence.end()
    return "".join([*parts, _linked(markdown[end:], source, uri)])


def _readmes() -> dict[Path, str]:
    found = [*ROOT.glob("packages/*/README.md"), *ROOT.glob("examples/*/README.md")]
    return {path: f"{path.parts[-3]}/{path.parts[-2]}.md" for path in sorted(found)}


def _linked(text: str, source: Path, uri: str) -> str:
    def link_to(path: Path, label: str, anchor: str = "") -> str:
        page = _readmes().get(path)
        if page is None and path.is_relative_to(DOCS):
            page = path.relative_to(DOCS).as_posix()
        if page is None:
            return label
        return f"[{label}]({os.path.relpath(page, Path(uri).parent)}{anchor})"

    def linked(link: re.Match[str]) -> str:
        path = (source.parent / link[2]).resolve()
        return link_to(path, link[1], link[3] or "") if path.exists() else link[0]

    text = LINK.sub(linked, text)
    if source in _readmes():
        text = NAMED.sub(lambda name: link_to(ROOT / name[1], name[0]), text)
    return text
