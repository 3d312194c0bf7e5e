"""Tests whose bodies run on the CPU and, where there is one, on a GPU."""

import pytest
import torch

on_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = pytest.param("cuda", marks=on_cuda)
needs_cuda = pytest.mark.parametrize("device", [CUDA])
everywhere = pytest.mark.parametrize("device", ["cpu", CUDA])
anywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.sweep), CUDA])
