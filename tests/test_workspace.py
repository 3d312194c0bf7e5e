"""Promises of the workspace: who imports whom, what is declared, and that the install is fresh."""

import ast
import importlib.metadata
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGES = ("remat-graph", "remat-partition", "remat-solvers", "remat-exec", "remat")
MODULES = tuple(name.replace("-", "_") for name in PACKAGES)
TORCH_FREE = ("remat_graph", "remat_partition", "remat_solvers")


def project(package):
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def sources(package):
    found = sorted((ROOT / "packages" / package / "src").rglob("*.py"))
    assert found
    return found


def imports(path):
    """Every absolute module name that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} has a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(name, package):
    return name == package or name.startswith(f"{package}.")


def requirements(texts):
    """Requirements by name and extra, in one spelling."""
    return {(r.name.replace("_", "-").lower(), str(r)) for r in map(Requirement, texts)}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("remat-graph", set()),
        ("remat-partition", {"remat_graph"}),
        ("remat-solvers", {"remat_graph"}),
        ("remat-exec", {"remat_graph"}),
        ("remat", set(MODULES)),
    ],
)
def test_siblings_meet_only_in_the_protocol(package, allowed):
    own = package.replace("-", "_")
    for path in sources(package):
        siblings = {name.partition(".")[0] for name in imports(path)} & set(MODULES)
        assert siblings <= allowed | {own}, path


def test_torch_stays_where_it_belongs():
    """What plans without torch must not import it, not even inside a function."""
    capture = ROOT / "packages/remat-graph/src/remat_graph/torch"
    for module in TORCH_FREE:
        for path in sources(module.replace("_", "-")):
            if path.is_relative_to(capture):
                continue
            for name in imports(path):
                assert not under(name, "torch"), path
                assert not under(name, "remat_graph.torch"), path


def test_importing_the_torch_free_packages_loads_no_torch():
    code = f"import sys, {', '.join(TORCH_FREE)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_is_declared(package):
    declared = list(project(package)["dependencies"])
    for extra in project(package).get("optional-dependencies", {}).values():
        declared += extra
    known = {name.replace("-", "_") for name, _ in requirements(declared)}
    known |= set(sys.stdlib_module_names) | {package.replace("-", "_")}
    if any(Requirement(text).extras == {"torch"} for text in declared):
        known |= {"torch", "numpy"}
    for path in sources(package):
        assert {name.partition(".")[0] for name in imports(path)} <= known, path


@pytest.mark.parametrize("package", PACKAGES)
def test_dependencies_state_ranges(package):
    for text in project(package)["dependencies"]:
        requirement = Requirement(text)
        if requirement.name in PACKAGES:
            assert str(requirement.specifier) == "<0.2,>=0.1", text
        else:
            assert any(s.operator == ">=" for s in requirement.specifier), text


@pytest.mark.parametrize("package", PACKAGES)
def test_the_installed_metadata_is_fresh(package):
    """An existing environment does not notice a new version or entry point: `hatch run relink`."""
    installed = importlib.metadata.distribution(package)
    stated = project(package)
    about = ROOT / "packages" / package / "src" / package.replace("-", "_") / "__about__.py"
    assert installed.version == runpy.run_path(str(about))["__version__"]
    groups = dict(stated.get("entry-points", {})) | {"console_scripts": stated.get("scripts", {})}
    expected = {
        (group, name, target) for group, points in groups.items() for name, target in points.items()
    }
    assert {(p.group, p.name, p.value) for p in installed.entry_points} == expected
    base = [text for text in installed.requires or [] if "extra ==" not in text]
    assert requirements(base) == requirements(stated["dependencies"])


@pytest.mark.parametrize("package", PACKAGES)
def test_entry_points_name_something_that_exists(package):
    """Checked on the sources, so that the environment need not be fresh."""
    stated = project(package)
    groups = [*stated.get("entry-points", {}).values(), stated.get("scripts", {})]
    for target in (target for points in groups for target in points.values()):
        module, _, attribute = target.partition(":")
        path = ROOT / "packages" / package / "src" / Path(*module.split("."))
        package_file = path / "__init__.py"
        file = package_file if package_file.exists() else path.with_suffix(".py")
        tree = ast.parse(file.read_text())
        names = {node.name for node in tree.body if hasattr(node, "name")}
        names |= {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom)
                  for a in n.names}  # fmt: skip
        assert attribute in names, target


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_stands_alone(package):
    folder = ROOT / "packages" / package
    for name in ("README.md", "CHANGELOG.md", "LICENSE"):
        assert (folder / name).read_text().strip(), name
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (folder / "src" / package.replace("-", "_") / "py.typed").exists()
    assert project(package)["name"] == package


def test_no_member_is_forgotten():
    assert sorted(path.name for path in (ROOT / "packages").iterdir()) == sorted(PACKAGES)


def test_the_commands_that_pages_name_exist_and_all_are_told():
    scripts = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]["scripts"]
    readme, contributing = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    assert scripts.keys() == set(re.findall(r"hatch run (\w+)", readme + contributing))
    assert "pip install hatch && hatch run demo\nhatch run test\n" in readme
