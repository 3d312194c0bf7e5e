"""Imports go one way: between the five packages, between the modules of each, and its folders."""

import ast
import functools
import graphlib
import importlib
import itertools
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGES = Path(__file__).parents[1] / "packages"
MAY_IMPORT = {
    "remat_graph": set(),
    "remat_partition": {"remat_graph"},
    "remat_solvers": {"remat_graph"},
    "remat_exec": {"remat_graph"},
    "remat": {"remat_graph", "remat_partition", "remat_solvers", "remat_exec"},
}


@functools.cache
def modules_of(package):
    """Map the name of each module of a package to its file."""
    source = PACKAGES / package.replace("_", "-") / "src"
    found = {path.relative_to(source).with_suffix(""): path for path in source.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in found.items()}


def imports_of(node, *, for_types=False):
    """Yield the dotted names that code imports, also in functions; those for types if asked to."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_types:
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports_of(child, for_types=for_types)


@functools.cache
def parsed(path):
    """Read a file once for all tests."""
    return ast.parse(path.read_text())


@functools.cache
def names_in(path, *, for_types=False):
    """Names that a file imports."""
    return frozenset(imports_of(parsed(path), for_types=for_types))


@functools.cache
def edges_of(package):
    """Map each module to those of its package that it imports: where it holds, for types too."""
    modules = modules_of(package)
    assert modules
    edges = {}
    for name, path in modules.items():
        wanted = names_in(path, for_types=True)
        wanted = {w if w in modules else w.rpartition(".")[0] for w in wanted}
        edges[name] = wanted & modules.keys()
    return edges


def cycle_of(edges):
    """Find names that import one another in a circle, if there are any."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def folder_of(module):
    """Name the folder of a module; each method in `published` has one, each room of `torch`."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] in (["published"], ["torch"]) else 2])


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_modules_import_one_another(package):
    edges = edges_of(package)
    assert cycle_of(edges) is None
    first = {name: folder_of(name) for name in edges}
    folders = {folder: set() for folder in first.values()}
    for name, wanted in edges.items():
        folders[first[name]] |= {first[w] for w in wanted} - {first[name]}
    assert cycle_of(folders) is None


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_those_below_it(package):
    others = MAY_IMPORT.keys() - MAY_IMPORT[package] - {package}
    for path in modules_of(package).values():
        tops = {name.partition(".")[0] for name in names_in(path)}
        assert not tops & others, path


def test_nothing_of_ours_needs_published_methods():
    own, published = set(), "remat_solvers.published"
    for module, wanted in edges_of("remat_solvers").items():
        own |= set() if module.startswith(published) else wanted
    assert not [module for module in own if module.startswith(published)]


PUBLIC = {
    "remat_graph",
    "remat_graph.plugins",
    "remat_graph.testing",
    "remat_graph.torch",
    "remat_partition",
    "remat_solvers",
    "remat_solvers.step",
    "remat_solvers.toolkit",
    "remat_solvers.verdicts",
    "remat_exec",
}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_meet_in_public_names(package):
    for path in modules_of(package).values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom):
                modules, names = [node.module], [alias.name for alias in node.names]
            elif isinstance(node, ast.Import):
                modules, names = [alias.name for alias in node.names], []
            else:
                continue
            for module in modules:
                if module.split(".")[0] not in MAY_IMPORT.keys() - {package}:
                    continue
                assert module in PUBLIC, f"{path} reaches into {module}"
                public = importlib.import_module(module).__all__
                assert not set(names) - set(public), f"{path} takes what {module} does not offer"


@functools.cache
def declared(package):
    """Name what a package asks for, extras too, and what its extras of ours ask for."""
    project = tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    found = set()
    for line in itertools.chain(project["dependencies"], *extras):
        requirement = Requirement(line)
        found.add(canonicalize_name(requirement.name))
        if requirement.extras and (PACKAGES / requirement.name).exists():
            found |= declared(requirement.name)
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_it_declares(package):
    name = package.replace("_", "-")
    distributions = metadata.packages_distributions()
    for path in modules_of(package).values():
        tops = {each.partition(".")[0] for each in names_in(path)}
        for top in tops - sys.stdlib_module_names - {package}:
            offered = {canonicalize_name(each) for each in distributions.get(top, [top])}
            assert offered & declared(name), f"{path} imports {top}"
