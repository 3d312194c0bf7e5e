"""Bad input gets errors of this package that say what would do; trivial graphs are trivial."""

import math
import sys
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest

from remat_graph import Block, Graph, InvalidGraph, Op, Stage, Value, from_networkx
from remat_partition import (
    BrokenPartitioner,
    InvalidOption,
    PartitionError,
    UnknownOption,
    get_partitioner,
    list_partitioners,
    partition,
)
from remat_partition.h_partition import HPartition
from remat_partition.repeats import Repeats

ALL = ("h-partition", "repeats", "sequence")
CHAIN = 40


@pytest.fixture
def chain(plain):
    return plain([(i - 1,) if i else () for i in range(CHAIN)])


def test_three_partitioners_are_installed():
    assert set(ALL) <= set(list_partitioners())
    for name in ALL:
        assert list_partitioners()[name].distribution == "remat-partition"
        assert get_partitioner(name).name == name


@pytest.mark.parametrize("partitioner", ["h-partition", "repeats"])
@pytest.mark.parametrize("option", ["max_top_ops", "max_block_ops"])
@pytest.mark.parametrize("bound", [1, 0, -3, 2.5, 10.0, "10", True, math.nan, [3]])
def test_bounds_that_cannot_be_met(chain, partitioner, option, bound):
    with pytest.raises(InvalidOption, match=f"{option}=.* must be an int, 2 or more") as caught:
        partition(chain, partitioner=partitioner, **{option: bound})
    assert ("and no bool" in str(caught.value)) == (bound is True)
    assert caught.value.option == option
    assert caught.value.value is bound


@pytest.mark.parametrize("partitioner", ["h-partition", "repeats"])
@pytest.mark.parametrize(
    "alpha",
    [
        -0.5,
        -1,
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        pytest.param(-(10**5000), id="huge"),
        "0.5",
        True,
        1j,
        [0.5],
    ],
)
def test_alpha_that_will_not_do(chain, partitioner, alpha):
    with pytest.raises(InvalidOption, match=r"alpha=.* must be") as caught:
        partition(chain, partitioner=partitioner, alpha=alpha)
    assert len(str(caught.value)) < 120


def test_numbers_of_other_kinds_will_do(chain):
    expected = partition(chain, max_top_ops=5, max_block_ops=4, alpha=0.5)
    for alpha in (Fraction(1, 2), np.float32(0.5)):
        options = {"max_top_ops": np.int64(5), "max_block_ops": np.int8(4), "alpha": alpha}
        assert partition(chain, **options) == expected


def test_defaults_are_those_of_the_class(chain):
    made = HPartition()
    same = partition(
        chain, max_top_ops=made.max_top_ops, max_block_ops=made.max_block_ops, alpha=made.alpha
    )
    assert partition(chain) == same == partition(chain, partitioner="h-partition")


@pytest.mark.parametrize("kind", [HPartition, Repeats])
def test_every_option_does_something(plain, kind):
    """On some graph, another value gives another hierarchy."""
    sizes = [9, 8, 3, 1, 6, 2, 7] * 7
    graph = plain([(i - 1,) if i else () for i in range(49)], sizes=sizes,
                  classes=[str(i * i) for i in range(49)])  # fmt: skip
    usual = {"max_top_ops": 12, "max_block_ops": 6, "alpha": 0.5}
    expected = kind(**usual).partition(graph)
    for option, other in {"max_top_ops": 6, "max_block_ops": 3, "alpha": 5.0}.items():
        assert kind(**(usual | {option: other})).partition(graph) != expected


def test_an_option_that_nobody_has(chain):
    with pytest.raises(UnknownOption, match=r"'h-partition' takes no option 'beta'; .*alpha"):
        partition(chain, beta=1)


def test_an_object_has_its_options_already(chain):
    made = HPartition(max_top_ops=4)
    assert len(partition(chain, partitioner=made).root.members) <= 4
    with pytest.raises(UnknownOption, match="'alpha'; it is made already"):
        partition(chain, partitioner=made, alpha=0.5)


class Nameless(HPartition):
    name = None


@pytest.mark.parametrize("what", [HPartition, 3, None, Nameless()])
def test_what_is_no_partitioner(chain, what):
    with pytest.raises(PartitionError, match="neither the name of an installed"):
        partition(chain, partitioner=what)


def test_what_is_no_graph():
    dag = nx.DiGraph([("a", "b")])
    with pytest.raises(PartitionError, match=r"not a DiGraph; remat_graph\.from_networkx"):
        partition(dag)
    assert partition(from_networkx(dag)).root.members == ("a", "b")


def test_a_cycle_is_refused_where_the_graph_is_made():
    with pytest.raises(InvalidGraph, match="cycle"):
        partition(from_networkx(nx.DiGraph([("a", "b"), ("b", "c"), ("c", "a")])))
    values = (Value("x", 1), Value("y", 1))
    with pytest.raises(InvalidGraph, match="before any op has made it"):
        Graph(values, (Op("a", ("y",), ("x",), 1.0), Op("b", ("x",), ("y",), 1.0)))


@pytest.mark.parametrize("partitioner", ALL)
def test_trivial_graphs(partitioner):
    assert partition(Graph((), ()), partitioner=partitioner).root == Block("root", ())
    one = Graph((Value("v", 1),), (Op("a", (), ("v",), 1.0),))
    assert partition(one, partitioner=partitioner).root == Block("root", ("a",))
    backward = Graph(one.values, (Op("a", (), ("v",), 1.0, stage=Stage.BACKWARD),), boundary="a")
    assert partition(backward, partitioner=partitioner).root == Block("root", ())


@pytest.mark.parametrize("partitioner", ["h-partition", "repeats"])
def test_one_op_is_never_too_large(plain, partitioner):
    """Bounds count members: bytes, time and dependencies of an op fill no block."""
    count = 60
    before = [(i - 1,) if i else () for i in range(count - 1)]
    before.append(tuple(range(count - 1)))
    sizes = [10**18 if i == 7 else 1 for i in range(count)]
    root = partition(
        plain(before, sizes=sizes), partitioner=partitioner, max_top_ops=3, max_block_ops=2
    ).root
    assert len(root.members) <= 3
    assert all(len(b.members) == 2 for b in root.blocks() if b is not root)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a distribution with this source; entry point `mine` is its class `Mine`."""
    # A loaded plugin is kept, so every test has a module of its own.
    code = f"mine_{tmp_path.name}"

    def install(source):
        info = tmp_path / "mine-1.0.dist-info"
        info.mkdir()
        (tmp_path / f"{code}.py").write_text(source)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[remat.partitioners]\nmine = {code}:Mine\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop(code, None)


PLUGIN = """
from remat_graph import Block, Hierarchy
from remat_partition import InvalidOption

class Mine:
    name = "mine"
    def __init__(self, {parameters}):
        {body}
    def partition(self, graph):
        return Hierarchy(graph, Block(self.title, tuple(op.name for op in graph.ops)))
"""


def test_options_reach_a_plugin(plugin, chain):
    plugin(PLUGIN.format(parameters="*, title='usual'", body="self.title = title"))
    assert partition(chain, partitioner="mine", title="other").root.name == "other"
    assert partition(chain, partitioner="mine").root.name == "usual"
    with pytest.raises(UnknownOption, match=r"'mine' takes no option 'alpha'; .*: title"):
        partition(chain, partitioner="mine", alpha=0.5)


def test_a_plugin_may_take_any_option(plugin, chain):
    plugin(PLUGIN.format(parameters="**any", body="self.title = ','.join(sorted(any))"))
    root = partition(chain, partitioner="mine", alpha=0.5, max_top_ops=3, depth=2).root
    assert root.name == "alpha,depth,max_top_ops"


def test_a_plugin_refuses_values_itself(plugin, chain):
    plugin(
        PLUGIN.format(
            parameters="*, title='usual'", body="raise InvalidOption('title', title, 'never')"
        )
    )
    with pytest.raises(InvalidOption, match="title='x' will not do; never"):
        partition(chain, partitioner="mine", title="x")


def test_a_plugin_that_fails_on_an_option_is_broken(plugin, chain):
    plugin(PLUGIN.format(parameters="*, title='usual'", body="self.title = title.upper()"))
    with pytest.raises(BrokenPartitioner, match=r"mine 1\.0 .*cannot be made \(AttributeError"):
        partition(chain, partitioner="mine", title=3)
