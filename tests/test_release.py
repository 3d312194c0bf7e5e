"""What is released, what is refused, and that ranges of dependencies admit what is tested."""

import importlib.util
import itertools
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECTS = sorted(
    [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")]
)


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatched = pytest.MonkeyPatch()
    monkeypatched.setitem(sys.modules, "release", module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    monkeypatched.undo()


def git(folder, *arguments):
    who = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of two packages, one of them tagged."""
    for key, value in {"NAME": "tests", "EMAIL": "tests@localhost"}.items():
        monkeypatch.setenv(f"GIT_COMMITTER_{key}", value)
        monkeypatch.setenv(f"GIT_AUTHOR_{key}", value)
    for name, date in {"one-a": "2026-01-02", "one-b": "unreleased"}.items():
        source = tmp_path / "packages" / name / "src" / name.replace("-", "_")
        source.mkdir(parents=True)
        (source / "__about__.py").write_text('"""Version."""\n\n__version__ = "0.1.0"\n')
        (tmp_path / "packages" / name / "CHANGELOG.md").write_text(f"## 0.1.0 - {date}\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_what_has_no_tag_is_released(release, repository):
    first, second = release.pending(repository)
    assert (first.tag, second.tag) == ("one-a-v0.1.0", "one-b-v0.1.0")
    release.tag(repository, [first])
    assert release.pending(repository) == [second]


def test_a_working_tree_with_changes_is_refused(release, repository):
    (repository / "packages" / "new.txt").touch()
    with pytest.raises(release.Refused, match=r"new\.txt"):
        release.pending(repository)


def test_a_version_that_is_called_unreleased_is_refused(release, repository):
    dated, undated = release.pending(repository)
    release.check_dates([dated])
    with pytest.raises(release.Refused, match="no date in the CHANGELOG for one-b"):
        release.check_dates([dated, undated])


def requirements(project):
    table = tomllib.loads(project.read_text())["project"]
    extras = table.get("optional-dependencies", {}).values()
    for line in itertools.chain(table["dependencies"], *extras):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            yield requirement


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.parent.name)
def test_ranges_admit_the_versions_that_are_tested(project):
    outside = {
        str(requirement): metadata.version(requirement.name)
        for requirement in requirements(project)
        if not requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    }
    assert not outside


def test_all_are_for_the_same_pythons():
    wanted = {tomllib.loads(p.read_text())["project"]["requires-python"] for p in PROJECTS}
    assert wanted == {">=3.11"}
    assert "python =" not in (ROOT / "hatch.toml").read_text().partition("[envs.hatch-test]")[0]
