"""Distributions that declare partitioners, made as folders on the import path."""

import itertools
import re
import sys

import pytest

from remat_graph import Graph
from remat_graph.testing import unit_chain
from remat_partition import (
    BrokenPartitioner,
    DuplicatePartitioner,
    InvalidOption,
    PartitionError,
    UnknownOption,
    UnknownPartitioner,
    get_partitioner,
    list_partitioners,
    partition,
)
from remat_partition.h_partition import HPartition
from remat_partition.registry import resolve_partitioner

WORKING = """
from remat_graph import Block, Hierarchy

class Flat:
    name = "flat"
    def partition(self, graph):
        return Hierarchy(graph, Block("root", tuple(op.name for op in graph.ops)))

class Failing(Flat):
    def partition(self, graph):
        raise RuntimeError("boom")

class NeedsArguments(Flat):
    def __init__(self, size):
        pass

class NoPartitioner:
    pass

class Nameless(Flat):
    name = None

class Leaving(Flat):
    def partition(self, graph):
        raise SystemExit(3)
"""


NUMBERS = itertools.count()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a distribution `name` with a module of its own and these entry points."""

    def make(name, version, source, *more, **points):
        root = tmp_path / f"{name}-{version}"
        info = root / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (root / f"{name}_{code}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        points = [*points.items(), *more]
        lines = [f"{point} = {name}_{code}:{target}" for point, target in points]
        (info / "entry_points.txt").write_text("\n".join(["[remat.partitioners]", *lines]))
        monkeypatch.syspath_prepend(root)
        modules.append(f"{name}_{code}")

    # A loaded plugin is kept, so every test has modules of its own.
    code = f"code_{next(NUMBERS)}"
    modules = []
    yield make
    for module in modules:
        sys.modules.pop(module, None)


def test_listing_imports_nothing(install):
    install("listed", "1.2", "raise SystemExit", flat="Flat", cut="Cut")
    found = list_partitioners()
    assert re.fullmatch(r"listed 1\.2 \(listed_code_\d+:Flat\)", found["flat"].origin)
    assert found["cut"].distribution == "listed"
    assert list(found) == sorted(found)
    assert found["flat"].target.partition(":")[0] not in sys.modules


def test_getting_loads_once(install):
    install("works", "1.0", WORKING, works="Flat")
    assert list_partitioners()["works"].target.partition(":")[0] not in sys.modules
    first = get_partitioner("works")
    assert first.name == "flat"
    assert get_partitioner("works") is first


def test_partition_by_name(install):
    install("named", "1.0", WORKING, named="Flat", failing="Failing", leaving="Leaving")
    graph = Graph((), ())
    assert partition(graph, partitioner="named").graph == graph
    with pytest.raises(BrokenPartitioner, match=r"'failing' of named 1\.0 \(.*RuntimeError: boom"):
        partition(graph, partitioner="failing")
    with pytest.raises(BrokenPartitioner, match=r"'leaving' of named 1\.0 \(.*SystemExit: 3"):
        partition(graph, partitioner="leaving")


def test_a_name_may_have_options():
    graph = unit_chain(12)
    by_name = partition(graph, partitioner="h-partition(max_top_ops=4)")
    assert by_name == partition(graph, max_top_ops=4)
    assert by_name != partition(graph, max_top_ops=20)
    chosen = resolve_partitioner("h-partition(max_top_ops=4)")
    assert chosen.name == "h-partition(max_top_ops=4)"
    assert chosen.identity == resolve_partitioner(HPartition(max_top_ops=4)).identity
    with pytest.raises(UnknownOption, match=r"'h-partition' .*'ops'"):
        get_partitioner("h-partition(ops=4)")
    with pytest.raises(InvalidOption):
        get_partitioner("h-partition(max_top_ops='x')")
    with pytest.raises(PartitionError, match=r"partitioner='h-partition\(4\)' cannot be read"):
        get_partitioner("h-partition(4)")


def test_an_unknown_name_lists_the_known(install):
    install("known", "1.0", WORKING, flat="Flat")
    with pytest.raises(UnknownPartitioner, match=r"no partitioner is called 'flatt'; .*\bflat\b"):
        get_partitioner("flatt")
    with pytest.raises(UnknownPartitioner):
        partition(Graph((), ()), partitioner="flatt")


def test_two_distributions_with_one_name_are_both_named(install):
    install("one", "1.0", WORKING, flat="Flat")
    install("two", "2.0", WORKING, flat="Flat", other="Flat")
    both = r"(one 1\.0 .* and by two 2\.0)|(two 2\.0 .* and by one 1\.0)"
    for call in (list_partitioners, lambda: get_partitioner("flat")):
        with pytest.raises(DuplicatePartitioner, match=both) as caught:
            call()
        assert len(caught.value.origins) == 2
    assert get_partitioner("other").name == "flat"


def test_a_distribution_with_a_name_twice_is_at_fault_itself(install):
    install("same", "1.0", WORKING, ("flat", "Failing"), flat="Flat")
    both = r"same 1\.0 \(\w+:Flat\) and by same 1\.0 \(\w+:Failing\); .* declared once: report"
    with pytest.raises(DuplicatePartitioner, match=both):
        get_partitioner("flat")


def test_a_distribution_on_the_path_twice_is_one(install, monkeypatch):
    install("twice", "1.0", WORKING, flat="Flat")
    monkeypatch.setattr(sys, "path", [sys.path[0], *sys.path])
    assert list_partitioners()["flat"].distribution == "twice"


@pytest.mark.parametrize(
    ("source", "target", "cause"),
    [
        ("import no_such_module", "Flat", "ModuleNotFoundError"),
        ("1 // 0", "Flat", "ZeroDivisionError"),
        ("", "Missing", "AttributeError"),
        (WORKING, "NeedsArguments", "TypeError.*size"),
        (WORKING, "NoPartitioner", "a NoPartitioner is no Partitioner"),
        ("Flat = 3", "Flat", "TypeError"),
        ("raise SystemExit(3)", "Flat", "does not load .SystemExit: 3"),
        ("class Flat:\n    def __init__(self): raise SystemExit", "Flat", "made .SystemExit"),
        (WORKING, "Nameless", "a Nameless is no Partitioner, which has a `name`"),
        (WORKING, "Flat and more", "'bad_code_.*:Flat and more' is not of the form 'module:obj"),
    ],
)
def test_a_broken_plugin_is_reported_when_asked_for(install, source, target, cause):
    install("bad", "0.3", source, bad=target)
    install("good", "1.0", WORKING, good="Flat")
    assert {"bad", "good"} <= set(list_partitioners())
    assert get_partitioner("good").name == "flat"
    with pytest.raises(BrokenPartitioner, match=rf"'bad' of bad 0\.3 \(bad_code_\d+:.*{cause}"):
        get_partitioner("bad")
    with pytest.raises(BrokenPartitioner):
        get_partitioner("bad")
