"""Devices to plan for without having one: rates as their vendors state them.

Rates are of dense arithmetic, 32-bit floats without TF32 and 16-bit floats with 32-bit sums, and of
device memory. The time of a launch is in no data sheet: it is a round figure, and the same for all.
Kernels reach a share of these rates; what counts for a plan are the ratios between operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from remat_graph.torch.costs import DeviceSpec

__all__ = ["DEVICES"]

_LAUNCH_SECONDS = 4e-6


def _spec(name: str, teraflops: float, half_teraflops: float, terabytes: float) -> DeviceSpec:
    return DeviceSpec(
        name, teraflops * 1e12, half_teraflops * 1e12, terabytes * 1e12, _LAUNCH_SECONDS
    )


DEVICES: Mapping[str, DeviceSpec] = MappingProxyType(
    {
        # https://www.nvidia.com/en-us/data-center/h100/ (SXM; BF16 1,979 with sparsity, halved)
        "h100": _spec("NVIDIA H100 SXM", 67.0, 989.5, 3.35),
        # https://www.nvidia.com/en-us/data-center/a100/ (80 GB SXM)
        "a100": _spec("NVIDIA A100 80GB SXM", 19.5, 312.0, 2.039),
        # https://www.nvidia.com/en-us/data-center/l4/ (BF16 242 with sparsity, halved)
        "l4": _spec("NVIDIA L4", 30.3, 121.0, 0.3),
        # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
        # (appendix A: FP32, FP16 with FP32 accumulate dense, memory bandwidth)
        "4090": _spec("NVIDIA GeForce RTX 4090", 82.6, 165.2, 1.008),
        # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html (FP32 vector)
        "mi300x": _spec("AMD Instinct MI300X", 163.4, 1307.4, 5.3),
    }
)
