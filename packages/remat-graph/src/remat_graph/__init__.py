"""The protocol in which graphs are captured, cut, solved and run: types, simulator, JSON, hashing.

Needs neither torch nor a solver. `remat_graph.torch` (extra `torch`) captures a training graph,
`remat_graph.plugins` finds what other distributions offer.
"""

from remat_graph.__about__ import __version__
from remat_graph.block import Block
from remat_graph.document import SCHEMA_VERSION, decode, encode, load, save
from remat_graph.drawing import memory_to_svg, printable, to_dot, to_svg
from remat_graph.errors import (
    DocumentError,
    GraphError,
    InvalidGraph,
    InvalidSchedule,
    RematError,
)
from remat_graph.files import write_atomically
from remat_graph.footprint import Footprint
from remat_graph.graph import Graph, Numerics, Op, Stage, Value
from remat_graph.hashing import canonical_hash, equivalence_classes
from remat_graph.hierarchy import Hierarchy
from remat_graph.interchange import from_networkx, to_networkx
from remat_graph.leaving import (
    leave_late,
    leaves,
    put_in_leaves,
    reads_after_leaving,
    without_leaves,
)
from remat_graph.provenance import Provenance
from remat_graph.schedule import (
    Compute,
    Free,
    Schedule,
    Solution,
    Status,
    Step,
    Timeline,
    Trial,
    freed_next,
    simulate,
)
from remat_graph.subgraph import Subgraph, cut_out
from remat_graph.unique_blocks import Translation, UniqueBlock, block_hash

__all__ = [
    "SCHEMA_VERSION",
    "Block",
    "Compute",
    "DocumentError",
    "Footprint",
    "Free",
    "Graph",
    "GraphError",
    "Hierarchy",
    "InvalidGraph",
    "InvalidSchedule",
    "Numerics",
    "Op",
    "Provenance",
    "RematError",
    "Schedule",
    "Solution",
    "Stage",
    "Status",
    "Step",
    "Subgraph",
    "Timeline",
    "Translation",
    "Trial",
    "UniqueBlock",
    "Value",
    "__version__",
    "block_hash",
    "canonical_hash",
    "cut_out",
    "decode",
    "encode",
    "equivalence_classes",
    "freed_next",
    "from_networkx",
    "leave_late",
    "leaves",
    "load",
    "memory_to_svg",
    "printable",
    "put_in_leaves",
    "reads_after_leaving",
    "save",
    "simulate",
    "to_dot",
    "to_networkx",
    "to_svg",
    "without_leaves",
    "write_atomically",
]
