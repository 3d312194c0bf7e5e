"""Partitioners by name: from a training graph to a checked hierarchy of blocks."""

from remat_partition.__about__ import __version__
from remat_partition.errors import (
    BrokenPartitioner,
    DuplicatePartitioner,
    InvalidOption,
    PartitionError,
    UnknownOption,
    UnknownPartitioner,
)
from remat_partition.interface import Partitioner
from remat_partition.partitioning import partition
from remat_partition.registry import get_partitioner, list_partitioners, resolve_partitioner

__all__ = [
    "BrokenPartitioner",
    "DuplicatePartitioner",
    "InvalidOption",
    "PartitionError",
    "Partitioner",
    "UnknownOption",
    "UnknownPartitioner",
    "__version__",
    "get_partitioner",
    "list_partitioners",
    "partition",
    "resolve_partitioner",
]
