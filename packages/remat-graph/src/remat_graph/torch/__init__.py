"""Capture of a training graph from a PyTorch module (extra `torch` of `remat-graph`)."""

from remat_graph.torch.capturing import (
    Capture,
    Costs,
    FlatCall,
    capture,
    capture_region,
    read_call,
    tensor_at,
)
from remat_graph.torch.costs import Cost, DeviceSpec
from remat_graph.torch.errors import CaptureError, GuardMiss, NoBackward
from remat_graph.torch.guards import ModuleState, Signature
from remat_graph.torch.memory import AllocationRecorder, Mark
from remat_graph.torch.program import (
    GENERATOR_STATE_BYTES,
    Call,
    Input,
    LossCost,
    Output,
    Program,
    TensorFacts,
    Variable,
    Write,
)
from remat_graph.torch.strides import RealStrides
from remat_graph.torch.structure import Structure, flatten
from remat_graph.torch.tracing import original_forward, original_forwards

__all__ = [
    "GENERATOR_STATE_BYTES",
    "AllocationRecorder",
    "Call",
    "Capture",
    "CaptureError",
    "Cost",
    "Costs",
    "DeviceSpec",
    "FlatCall",
    "GuardMiss",
    "Input",
    "LossCost",
    "Mark",
    "ModuleState",
    "NoBackward",
    "Output",
    "Program",
    "RealStrides",
    "Signature",
    "Structure",
    "TensorFacts",
    "Variable",
    "Write",
    "capture",
    "capture_region",
    "flatten",
    "original_forward",
    "original_forwards",
    "read_call",
    "tensor_at",
]
