"""Devices to plan for without having one: rates from the vendors' data sheets, not measured.

The source of its four figures stands at each; these documents could not be opened when the numbers
were last compared. Pages that cite them have the same figures for H100, A100 and L4, and the same
memory and rate of memory for MI300X; the rest was compared with units and clocks alone. Rates are
of dense arithmetic, 32-bit floats without TF32 and 16-bit floats with 32-bit sums, and of device
memory; what follows from the units and the clock stands beside each. Memory is in decimal
gigabytes, somewhat less than there is. The time of a launch is in no data sheet: it is a round
figure, and the same for all. Kernels reach a share of these rates; what counts for a plan are the
ratios between operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from remat_graph.torch.costs import DeviceSpec

__all__ = ["DEVICES"]

_LAUNCH_SECONDS = 4e-6


def _spec(
    name: str, teraflops: float, half_teraflops: float, terabytes: float, memory_gigabytes: int
) -> DeviceSpec:
    return DeviceSpec(
        name,
        teraflops * 1e12,
        half_teraflops * 1e12,
        terabytes * 1e12,
        _LAUNCH_SECONDS,
        memory_gigabytes * 10**9,
    )


DEVICES: Mapping[str, DeviceSpec] = MappingProxyType(
    {
        # https://www.nvidia.com/en-us/data-center/h100/ (SXM; BF16 1,979 with sparsity, halved).
        # 132 SMs: 128 lanes x 2 at 1.98 GHz; tensor cores 4,096 at 1.83 GHz.
        "h100": _spec("NVIDIA H100 SXM", 67.0, 989.5, 3.35, 80),
        # https://www.nvidia.com/en-us/data-center/a100/ (80 GB SXM).
        # 108 SMs at 1.41 GHz: 64 lanes x 2; tensor cores 2,048.
        "a100": _spec("NVIDIA A100 80GB SXM", 19.5, 312.0, 2.039, 80),
        # https://www.nvidia.com/en-us/data-center/l4/ (BF16 242 with sparsity, halved).
        # 7,424 lanes x 2 at 2.04 GHz; tensor cores four times that; 192 bits at 12.5 Gbit/s.
        "l4": _spec("NVIDIA L4", 30.3, 121.0, 0.3, 24),
        # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
        # (appendix A: FP32, FP16 with FP32 accumulate dense, memory bandwidth).
        # 16,384 lanes x 2 at 2.52 GHz; tensor cores twice that; 384 bits at 21 Gbit/s.
        "4090": _spec("NVIDIA GeForce RTX 4090", 82.6, 165.2, 1.008, 24),
        # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html (FP32 vector).
        # 304 units at 2.1 GHz: 256 for FP32, matrix cores 2,048 for BF16.
        "mi300x": _spec("AMD Instinct MI300X", 163.4, 1307.4, 5.3, 192),
    }
)
