"""`check_partitioner` finds what is wrong with a partitioner, and nothing where nothing is."""

import itertools

import pytest

from remat_graph import Block, Hierarchy
from remat_partition import PartitionError, UnknownPartitioner, list_partitioners
from remat_partition.testing import PartitionerCheckFailed, check_partitioner


class Flat:
    """One block of everything."""

    name = "flat"

    def partition(self, graph):
        names = tuple(op.name for op in graph.ops[: graph.boundary_index])
        return Hierarchy(graph, Block("root", names))


class Fickle(Flat):
    """Calls the root something else each time."""

    def __init__(self):
        self._count = itertools.count()

    def partition(self, graph):
        names = tuple(op.name for op in graph.ops[: graph.boundary_index])
        return Hierarchy(graph, Block(f"root {next(self._count)}", names))


class Backward(Flat):
    def partition(self, graph):
        return Hierarchy(graph, Block("root", tuple(op.name for op in graph.ops)))


class Unfinished(Flat):
    def partition(self, graph):
        return None


class Unwilling(Flat):
    def partition(self, graph):
        raise PartitionError("it is Monday")


class Silent(Flat):
    def partition(self, graph):
        raise PartitionError(" ")


@pytest.mark.parametrize(
    ("partitioner", "fault"),
    [
        (Fickle, "it is cut in another way the second time"),
        (Backward, r"a long chain: partitioner 'flat' of .*Backward is broken"),
        (Unfinished, "it returned a NoneType, no Hierarchy"),
        (Unwilling, "it refused every graph, even a chain"),
        (Silent, "it refused without a reason"),
    ],
)
def test_what_is_wrong_is_found(partitioner, fault):
    with pytest.raises(PartitionerCheckFailed, match=fault):
        check_partitioner(partitioner, graphs=8)


@pytest.mark.parametrize("partitioner", [*list_partitioners(), Flat, Flat()])
def test_nothing_is_found_where_nothing_is(partitioner):
    check = check_partitioner(partitioner, graphs=20)
    assert (check.faults, check.graphs) == ([], 21)
    bounded = partitioner in ("h-partition", "repeats")
    assert (check.largest_block <= 20) == bounded
    assert "0 faults" in str(check)


def test_an_unknown_name_is_no_fault():
    with pytest.raises(UnknownPartitioner):
        check_partitioner("nosuch")
