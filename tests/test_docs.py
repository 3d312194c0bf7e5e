"""The pages hold together: links lead somewhere, and what is listed is all that there is."""

import importlib.metadata
import math
import re
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest
import typer

from remat.command import app
from remat_graph import document

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
NAMED = re.compile(r"`((?:docs|examples)/[\w./-]+\.md)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
WRITTEN = re.compile(r"^<!-- (\S+) -->.*?^<!-- end of \1 -->", re.MULTILINE | re.DOTALL)
SCREEN = (45, 120)  # lines, columns
OF_THE_READER = ("net.py", "remat_solvers/published/baselines/evict_cheapest.py")
BODIES = {
    "### `graph`": document._Graph,
    "A value:": document._Value,
    "An op:": document._Op,
    "### `schedule`": document._Schedule,
    "### `hierarchy`": document._Hierarchy,
    "A block:": document._Block,
    "### `solution`": document._Solution,
}


def files(*patterns):
    """List the files that git knows, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]


def pages():
    return files("*.md")


def records():
    return sorted((ROOT / "docs" / "decisions").glob("0*.md"))


def table(text, title):
    """Give the first cells of the first table after a title."""
    _, found, rest = text.partition(f"\n{title}\n")
    assert found, title
    rows = rest[rest.index("|") :].partition("\n\n")[0].splitlines()[2:]
    return [row.split("|")[1].strip().strip("`") for row in rows]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    text = FENCE.sub("", page.read_text())
    lost = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not lost


def test_modules_that_pages_name_are_there():
    modules = [path.as_posix() for path in files("*.py")]
    lost = [
        (page.name, name)
        for page in pages()
        if page.name != "CHANGELOG.md"
        for name in re.findall(r"`([\w./-]+\.py)\b", page.read_text())
        if name not in OF_THE_READER and not any(path.endswith(f"/{name}") for path in modules)
    ]
    assert not lost


def test_what_a_package_index_shows_leads_nowhere_else():
    """An index shows the README of a package without the repository around it."""
    for readme in files("packages/*/README.md"):
        text = FENCE.sub("", readme.read_text())
        assert not LINK.findall(text), readme
        assert not [name for name in NAMED.findall(text) if not (ROOT / name).exists()], readme


def command_lines():
    """List the calls of the command in blocks of pages, without what is said of them."""
    for page in pages():
        for fence in FENCE.findall(page.read_text()):
            for line in re.sub(r"\\\n *", "", fence).splitlines():
                call = re.split(r" {2,}| #", re.sub(r"[\[\]]", "", line.strip()))[0]
                if re.match("remat [a-z]", call) and call != "remat plan":  # that begins a plan
                    first, *others = call.split(" | ")
                    yield first
                    yield from (f"{first.rpartition(' ')[0]} {other}" for other in others)


def test_the_command_takes_what_pages_type():
    whole = typer.main.get_command(app)
    lines = list(command_lines())
    assert len(lines) > 20
    for line in lines:
        command, words = whole, shlex.split(line)[1:]
        context = command.make_context("remat", list(words))
        while hasattr(command, "resolve_command"):
            name, command, words = command.resolve_command(context, words)
            context = command.make_context(name, list(words), parent=context)


@pytest.mark.parametrize("record", records(), ids=lambda record: record.name)
def test_a_decision_record_fits_on_a_screen(record):
    lines, columns = SCREEN
    shown = [math.ceil(len(line) / columns) or 1 for line in record.read_text().splitlines()]
    assert sum(shown) <= lines


def test_each_door_fits_on_a_screen():
    doors = (ROOT / "docs" / "how-it-works.md").read_text().split("\n## ")[1:6]
    assert [door[0] for door in doors] == list("12345")
    assert max(len(door.splitlines()) for door in doors) <= SCREEN[0]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_no_wider_than_a_screen(page):
    lines = WRITTEN.sub("", FENCE.sub("", page.read_text())).splitlines()
    assert [line for line in lines if len(line) > SCREEN[1] and line[:1] not in ("|", "#")] == []


def test_every_decision_is_listed():
    listed = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert LINK.findall(listed) == [record.name for record in records()]


@pytest.mark.parametrize("title", BODIES)
def test_the_specification_has_the_fields_of_the_documents(title):
    text = (ROOT / "docs" / "protocol.md").read_text()
    fields = msgspec.structs.fields(BODIES[title])
    assert table(text, title) == [field.encode_name for field in fields]


def test_every_solver_of_the_package_is_explained():
    text = (ROOT / "docs" / "solvers.md").read_text()
    explained = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
                 for name in re.findall(r"`([^`]+)`", row)}  # fmt: skip
    ours = importlib.metadata.distribution("remat-solvers").entry_points
    assert explained == {point.name for point in ours.select(group="remat.solvers")}
