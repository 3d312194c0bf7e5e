"""What is captured for a CUDA device that is not there has that device's operators."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from remat_graph.torch import CaptureError, DeviceSpec, capture
from remat_graph.torch.calls import GENERATOR_STATE_BYTES

A100, L4, H100, CPU = (8, 0), (8, 9), (9, 0), None
HALF, FULL, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def spec(capability):
    return DeviceSpec("x", 1e12, 1e13, 1e12, 1e-6, capability=capability)


class Attention(nn.Module):
    """Attention with options, of heads of this width, some of them shared, in this type."""

    def __init__(self, dtype=FULL, width=8, shared=1, mask=None, **options):
        super().__init__()
        self.project = nn.Linear(16, 4 * width, dtype=dtype)
        self.context = nn.Linear(16, 4 * width // shared, dtype=dtype)
        self.width, self.mask, self.options = width, mask, options

    def forward(self, x):
        q, k = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
                for layer in (self.project, self.context))  # fmt: skip
        mask = None if self.mask is None else self.mask(x.shape[1])
        attend = nn.functional.scaled_dot_product_attention
        return attend(q, k, k, attn_mask=mask, **self.options).square().mean()


def window(length):
    place = torch.arange(length)
    return (place[:, None] - place[None, :]).abs() < 3


def attention_of(module, capability, length=6):
    with torch.device("meta"):
        x = torch.rand(2, length, 16, dtype=module.project.weight.dtype)
    program = capture(module.to("meta"), (x,), costs=spec(capability)).program
    names = [call.name for call in program.calls.values() if "attention" in call.name]
    return sorted({name.removeprefix("aten._scaled_dot_product_").partition("_attention")[0]
                   for name in names})  # fmt: skip


@pytest.mark.parametrize(
    ("options", "capability", "kernel"),
    [
        ({"dropout_p": 0.1}, A100, ["efficient"]),
        ({"dropout_p": 0.1, "dtype": HALF}, A100, ["flash"]),
        ({"dropout_p": 0.1, "dtype": HALF}, H100, ["flash"]),
        ({"dropout_p": 0.125, "dtype": HALF}, H100, ["cudnn"]),
        ({"dropout_p": 0.1, "dtype": DOUBLE}, H100, []),
        ({"mask": window}, H100, ["efficient"]),
        ({"mask": window, "dtype": HALF}, A100, ["efficient"]),
        ({"mask": window, "dtype": HALF}, H100, ["cudnn"]),
        ({"shared": 2, "enable_gqa": True, "dtype": HALF}, A100, ["flash"]),
        ({"shared": 2, "enable_gqa": True}, A100, []),
        ({"shared": 2, "enable_gqa": True, "mask": window, "dtype": HALF}, A100, []),
        ({"shared": 2, "enable_gqa": True, "mask": window, "dtype": HALF}, H100, ["cudnn"]),
        ({"width": 6}, A100, []),
        ({"width": 6, "dtype": HALF}, A100, ["flash"]),
        ({"width": 256, "dtype": HALF}, H100, ["flash"]),
        ({"width": 256, "dtype": HALF}, L4, ["flash"]),
        ({"width": 200, "dtype": HALF}, L4, ["efficient"]),
        ({"width": 256, "dropout_p": 0.1, "dtype": HALF}, L4, ["efficient"]),
        ({}, CPU, ["flash"]),
        ({"dropout_p": 0.1}, CPU, []),
    ],
)
def test_attention_has_the_operator_that_its_device_has_for_it(options, capability, kernel):
    assert attention_of(Attention(**options), capability) == kernel


def test_a_mask_is_padded_as_it_is_given_not_for_each_head():
    with torch.device("meta"):
        captured = capture(Attention(mask=window), (torch.rand(2, 6, 16),), costs=spec(A100))
    graph = captured.graph
    padded = [v for op in graph.ops if op.name.startswith("constant_pad") for v in op.outputs]
    assert [value.size_bytes for value in graph.values if value.name in padded] == [512]


def test_kernels_that_are_switched_off_are_not_planned():
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        assert attention_of(Attention(), A100) == []


def test_attention_within_a_function_of_torch_is_seen():
    class Layer(nn.TransformerEncoderLayer):
        def __init__(self):
            super().__init__(16, 2, 32, dropout=0.1, batch_first=True)
            self.project = self.linear1

    assert attention_of(Layer(), A100) == ["efficient"]


def test_of_every_block_memory_is_kept_as_on_the_device():
    class Dropping(nn.Linear):
        def forward(self, x):
            scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
            return nn.functional.dropout(super().forward(x) * scale, 0.5).sum()

    captured = capture(Dropping(4, 4), (torch.rand(3, 4),), costs=spec(A100))
    sizes = {value.size_bytes for value in captured.graph.values}
    assert {size % 512 for size in sizes} == {0}
    assert captured.program.device.type == "cuda"
    assert all(op.workspace_bytes < GENERATOR_STATE_BYTES for op in captured.graph.ops)
    assert captured.dry


@pytest.mark.parametrize("capability", [CPU, A100])
def test_plain_autograd_keeps_each_of_equal_results(capability):
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x):
            x = x.exp()
            with torch.autocast(x.device.type, torch.bfloat16):
                made = [layer(x) for layer in self.layers]
            return sum(part.float().square().sum() for part in made)

    with torch.device("meta"):
        captured = capture(Casting(), (torch.rand(32, 64),), costs=spec(capability))
    casts = [
        sum(op.name.startswith("_to_copy") and op.twin is None for op in graph.ops)
        for graph in (captured.graph, captured.as_autograd())
    ]
    assert casts[1] == casts[0] + 2


def test_a_device_without_convolutions_per_second_is_refused():
    with pytest.raises(CaptureError, match="convolution_flops_per_second=0"):
        DeviceSpec("x", 1.0, 1.0, 1.0, 0.0, convolution_flops_per_second=0)


class Normed(Attention):
    """A norm, whose result CUDA's autocast keeps in 32 bits, and attention of it in 16."""

    def __init__(self, cast):
        super().__init__(dropout_p=0.1)
        self.norm, self.cast = nn.LayerNorm(16), cast

    def forward(self, x):
        with self.cast():
            y = self.project(x)
            made = self.norm(y[..., :16])
            assert y.dtype is y.sigmoid().dtype is y.clone().exp_().dtype is not FULL
            assert made.dtype is (y**2).dtype is y.softmax(-1).dtype is FULL
            return super().forward(made)


@pytest.mark.parametrize(
    "cast",
    [
        lambda: torch.autocast("cuda", HALF),
        lambda: torch.autocast("cpu", HALF),
        lambda: torch.amp.autocast(device_type="cuda", dtype=HALF),
        lambda: torch.autocast("cuda"),
    ],
)
def test_autocast_is_that_of_the_device(cast):
    assert attention_of(Normed(cast), A100) == ["flash"]


def test_autocast_of_other_threads_and_afterwards_is_as_it_was():
    class Asking(nn.Linear):
        def forward(self, x):
            with ThreadPoolExecutor(1) as pool:
                devices.append(pool.submit(lambda: torch.autocast("cpu").device).result())
                with pytest.warns(UserWarning, match="CUDA is not available"):
                    devices.append(pool.submit(lambda: torch.autocast("cuda").device).result())
            devices.append(torch.autocast("cuda").device)
            return super().forward(x).sum()

    devices, before = [], torch.autocast.__init__
    capture(Asking(4, 4), (torch.rand(3, 4),), costs=spec(A100))
    assert set(zip(*[iter(devices)] * 3, strict=True)) == {("cpu", "cuda", "cpu")}
    assert torch.autocast.__init__ is before


class Sampling(nn.Linear):
    """Operators whose fake tensors on CUDA want a device: torch indexes them, or asks for it."""

    def __init__(self):
        super().__init__(16, 64)

    def forward(self, x):
        image = super().forward(x).view(-1, 1, 8, 8)
        sampled = nn.functional.grid_sample(image, torch.zeros(4, 8, 8, 2), align_corners=False)
        rounded = torch.fake_quantize_per_tensor_affine(sampled, 0.1, 0, 0, 255)
        return nn.functional.unfold(rounded, 3).sum()


def test_operators_whose_fake_tensors_want_a_device_are_captured():
    graphs = [capture(Sampling(), (torch.rand(4, 16),), costs=spec(c)).graph for c in (CPU, A100)]
    here, there = ([op.name for op in graph.ops] for graph in graphs)
    assert there == here
    assert any(name.startswith("grid_sampler_2d_backward") for name in there)
