"""A hook of MkDocs: the READMEs of packages and examples are pages, and links stay in the site.

In the repository pages link to each other, and to code, by paths. A link to a README becomes one to
its page; a link to a file that the site does not have becomes its text. A link to nothing is left
as it is, and the strict build fails on it.
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
    def replace(link: re.Match[str]) -> str:
        label, target, anchor = link[1], link[2], link[3] or ""
        path = (source.parent / target).resolve()
        if not path.exists():
            return link[0]
        page = _readmes().get(path)
        if page is None and path.is_relative_to(DOCS):
            page = path.relative_to(DOCS).as_posix()
        if page is None:
            return label
        return f"[{label}]({os.path.relpath(page, Path(uri).parent)}{anchor})"

    return LINK.sub(replace, text)
