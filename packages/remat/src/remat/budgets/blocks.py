"""What blocks of CUDA's caching allocator take beyond what tensors ask for, and what helps."""

from __future__ import annotations

import torch

from remat_exec import Peak

__all__ = ["later_blocks", "or_with_expandable_segments"]

_PART = 4


def later_blocks(peak: Peak) -> int:
    """Say how many bytes a later step may take beyond a measured one, if it gets other blocks.

    A quarter of what blocks took beyond what tensors asked for (decision 0048); none where they
    were as large, or the executor does not tell.
    """
    asked = peak.requested_bytes or peak.peak_bytes
    return (peak.peak_bytes - asked) // _PART


def or_with_expandable_segments(device: torch.device) -> str:
    """Say, after what else helps, how to start so that blocks take nothing beyond; of CUDA only."""
    if device.type != "cuda":
        return ""
    return (
        ", or start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: without it a block may "
        "be 1 MiB larger than what a tensor asks for"
    )
