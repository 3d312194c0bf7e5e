"""Capture of a training graph from a PyTorch module (extra `torch` of `remat-graph`).

A call of a module goes through the rooms in this order: `capturing` takes it, `tracing` gives its
joint graph, of which `repeats` has few of the blocks that do the same traced; `rewrites` passes
over it, `lowering` reads a program out of it, `repeats` puts the other blocks in, `cost` says what
each operator takes. `ways` then adds other ways to make the same, with functions of `kernels`;
`fusing` finds what is compiled to one operator, and compiles it;
`slices` says which calls can run slice by slice. What is known of each operator is in `operators`.
"""

from remat_graph.torch.calls import GENERATOR_STATE_BYTES, Body
from remat_graph.torch.capturing.capture import capture, capture_region, passes_of, tensor_at
from remat_graph.torch.capturing.captures import Capture, Costs
from remat_graph.torch.capturing.registry import Capturer, get_capture, list_captures
from remat_graph.torch.capturing.sized_trace import has_sizes, trace_sizes
from remat_graph.torch.capturing.sizes import BUCKET, CallSizes, SizedCapture, SizedRegion
from remat_graph.torch.capturing.trace import original_forward, original_forwards
from remat_graph.torch.cost.costs import Cost, DeviceSpec
from remat_graph.torch.cost.cuda_memory import blocks_in_use
from remat_graph.torch.cost.devices import DEVICES
from remat_graph.torch.cost.memory import AllocationRecorder, Mark
from remat_graph.torch.cost.strides import RealStrides
from remat_graph.torch.deferring import forward_runs_again, ops_making
from remat_graph.torch.errors import (
    BrokenCapture,
    CaptureError,
    DuplicateCapture,
    MeasurementError,
    NoBackward,
    UnknownCapture,
)
from remat_graph.torch.fusing.beside import Compilation
from remat_graph.torch.fusing.compiling import missing_compiler
from remat_graph.torch.fusing.kernel import Kernel, results_of, run_fused, run_over
from remat_graph.torch.fusing.missing import KernelsMissing, kernels_there_alone, raise_missing
from remat_graph.torch.operators import Operator, operator_of, placements
from remat_graph.torch.process import (
    beside_profilers,
    collector_at_rest,
    generators_restored,
    graph_runs,
    own_thread,
    process_lock,
    quietly,
    remember_generators,
    remember_modes,
)
from remat_graph.torch.program import (
    Alternative,
    Call,
    Input,
    LossCost,
    Output,
    Program,
    TensorFacts,
    Variable,
    Write,
)
from remat_graph.torch.recomputing import allow_recompute
from remat_graph.torch.rewrites.passes import PassRun, check_passes
from remat_graph.torch.slices.placement import SUMMED, WHOLE, Placement, Sliced, Summed, Whole
from remat_graph.torch.tracing.aot import saves_through_hooks
from remat_graph.torch.tracing.inner_gradients import computes_gradients
from remat_graph.torch.tracing.kept_symbols import symbols_kept
from remat_graph.torch.tracing.lstm_in_layers import lstms_of_any_length
from remat_graph.torch.tracing.provenance import note, source_of
from remat_graph.torch.tracing.restoring import copied, left_as_it_was, reachable, remember_state
from remat_graph.torch.tracing.rnns import draws_otherwise
from remat_graph.torch.tracing.structure import (
    FlatCall,
    Structure,
    flatten,
    read_call,
    sharing,
    tensors_of_call,
)
from remat_graph.torch.tracing.symbols import OtherSizes
from remat_graph.torch.ways.cuts import Cut
from remat_graph.torch.ways.slice_by_slice import SlicedBody
from remat_graph.torch.ways.slicing import body_of, read_as_traced
from remat_graph.torch.ways.stretches import Stretch, stretch_from

__all__ = [
    "BUCKET",
    "DEVICES",
    "GENERATOR_STATE_BYTES",
    "SUMMED",
    "WHOLE",
    "AllocationRecorder",
    "Alternative",
    "Body",
    "BrokenCapture",
    "Call",
    "CallSizes",
    "Capture",
    "CaptureError",
    "Capturer",
    "Compilation",
    "Cost",
    "Costs",
    "Cut",
    "DeviceSpec",
    "DuplicateCapture",
    "FlatCall",
    "Input",
    "Kernel",
    "KernelsMissing",
    "LossCost",
    "Mark",
    "MeasurementError",
    "NoBackward",
    "Operator",
    "OtherSizes",
    "Output",
    "PassRun",
    "Placement",
    "Program",
    "RealStrides",
    "SizedCapture",
    "SizedRegion",
    "Sliced",
    "SlicedBody",
    "Stretch",
    "Structure",
    "Summed",
    "TensorFacts",
    "UnknownCapture",
    "Variable",
    "Whole",
    "Write",
    "allow_recompute",
    "beside_profilers",
    "blocks_in_use",
    "body_of",
    "capture",
    "capture_region",
    "check_passes",
    "collector_at_rest",
    "computes_gradients",
    "copied",
    "draws_otherwise",
    "flatten",
    "forward_runs_again",
    "generators_restored",
    "get_capture",
    "graph_runs",
    "has_sizes",
    "kernels_there_alone",
    "left_as_it_was",
    "list_captures",
    "lstms_of_any_length",
    "missing_compiler",
    "note",
    "operator_of",
    "ops_making",
    "original_forward",
    "original_forwards",
    "own_thread",
    "passes_of",
    "placements",
    "process_lock",
    "quietly",
    "raise_missing",
    "reachable",
    "read_as_traced",
    "read_call",
    "remember_generators",
    "remember_modes",
    "remember_state",
    "results_of",
    "run_fused",
    "run_over",
    "saves_through_hooks",
    "sharing",
    "source_of",
    "stretch_from",
    "symbols_kept",
    "tensor_at",
    "tensors_of_call",
    "trace_sizes",
]
