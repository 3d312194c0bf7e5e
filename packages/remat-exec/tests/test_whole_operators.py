"""Operators that torch would take apart while tracing: eager's bits, in eager's memory."""

import pytest
import torch
from exec_cases.models import Case
from torch import nn
from torch.nn import functional

from remat_exec import measure_peak


class UNet(nn.Module):
    """One level down, and up again by an interpolation."""

    def __init__(self, mode):
        super().__init__()
        self.options = {"mode": mode, "scale_factor": 2}
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(24, 3, 3, padding=1)
        self.deep = nn.Conv2d(8, 16, 3, padding=1)

    def forward(self, x):
        x = functional.softshrink(self.first(x), 0.1)
        deep = self.deep(functional.max_pool2d(x, 2)).relu()
        return self.last(torch.cat([x, functional.interpolate(deep, **self.options)], 1))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest", "nearest-exact"])
def test_a_unet_takes_what_eager_takes(mode, layout):
    torch.manual_seed(0)
    model = UNet(mode).double().to(memory_format=layout)
    x = torch.randn(2, 3, 32, 32, dtype=torch.double).to(memory_format=layout)
    found, peaks = [], []
    for call in (Case("whole", lambda: model, lambda: (x,), None).remat(), model):
        for _ in range(2):  # the first shows what is kept from then on
            model.zero_grad(set_to_none=True)
            with measure_peak() as peak:
                output = call(x)
                output.square().sum().backward()
        found.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
        peaks.append(peak.peak_bytes)
    assert all(torch.equal(got, expected) for got, expected in zip(*found, strict=True))
    assert peaks[0] <= 1.01 * peaks[1]
