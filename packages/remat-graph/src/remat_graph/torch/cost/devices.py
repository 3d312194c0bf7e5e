"""Devices to plan for without having one: rates fitted to steps on it, or from the data sheet.

A fit is to the plain steps of five models on an H100 (`benchmarks/estimates.py`), which are off by
up to 2% then: so many tell apart the share that products and memory reach of the data sheet's
rates, the rate of convolutions in 32 bits, which are cuDNN's in TF32, and the time of a launch from
Python, which is in no data sheet and taken to be the same for all. Of the other devices none was at
hand: their rates are the data sheets', which no kernel reaches. The source of four figures stands
at each; these documents could not be opened when the numbers were last compared. Pages that cite
them have the same figures for H100, A100 and L4, and the same memory and rate of memory for MI300X;
the rest was compared with units and clocks alone. Rates are of dense arithmetic, 32-bit floats
without TF32 and 16-bit floats with 32-bit sums, and of device memory; what follows from the units
and the clock stands beside each. Memory is in decimal gigabytes, somewhat less than there is. What
counts for a plan are the ratios between operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from remat_graph.torch.cost.costs import DeviceSpec

__all__ = ["DEVICES"]

_LAUNCH_SECONDS = 25.1e-6


def _spec(
    name: str,
    teraflops: float,
    half_teraflops: float,
    terabytes: float,
    memory_gigabytes: int,
    capability: tuple[int, int],
) -> DeviceSpec:
    return DeviceSpec(
        name,
        teraflops * 1e12,
        half_teraflops * 1e12,
        terabytes * 1e12,
        _LAUNCH_SECONDS,
        memory_gigabytes * 10**9,
        capability,
    )


def _fitted(sheet: DeviceSpec, share: float, convolution_teraflops: float) -> DeviceSpec:
    return replace(
        sheet,
        flops_per_second=share * sheet.flops_per_second,
        half_flops_per_second=share * sheet.half_flops_per_second,
        bytes_per_second=share * sheet.bytes_per_second,
        convolution_flops_per_second=convolution_teraflops * 1e12,
    )


DEVICES: Mapping[str, DeviceSpec] = MappingProxyType(
    {
        # https://www.nvidia.com/en-us/data-center/h100/ (SXM; BF16 1,979 with sparsity, halved).
        # 132 SMs: 128 lanes x 2 at 1.98 GHz; tensor cores 4,096 at 1.83 GHz.
        "h100": _fitted(_spec("NVIDIA H100 SXM", 67.0, 989.5, 3.35, 80, (9, 0)), 0.776, 115.4),
        # https://www.nvidia.com/en-us/data-center/a100/ (80 GB SXM).
        # 108 SMs at 1.41 GHz: 64 lanes x 2; tensor cores 2,048.
        "a100": _spec("NVIDIA A100 80GB SXM", 19.5, 312.0, 2.039, 80, (8, 0)),
        # https://www.nvidia.com/en-us/data-center/l4/ (BF16 242 with sparsity, halved).
        # 7,424 lanes x 2 at 2.04 GHz; tensor cores four times that; 192 bits at 12.5 Gbit/s.
        "l4": _spec("NVIDIA L4", 30.3, 121.0, 0.3, 24, (8, 9)),
        # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
        # (appendix A: FP32, FP16 with FP32 accumulate dense, memory bandwidth).
        # 16,384 lanes x 2 at 2.52 GHz; tensor cores twice that; 384 bits at 21 Gbit/s.
        "4090": _spec("NVIDIA GeForce RTX 4090", 82.6, 165.2, 1.008, 24, (8, 9)),
        # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html (FP32 vector).
        # 304 units at 2.1 GHz: 256 for FP32, matrix cores 2,048 for BF16.
        "mi300x": _spec("AMD Instinct MI300X", 163.4, 1307.4, 5.3, 192, (9, 4)),
    }
)
