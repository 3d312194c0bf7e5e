"""Models of diffusion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from matrix_cases.case import Built
from wild_cases.packages import load

__all__ = ["MODELS"]


def _image(size: int, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size)


def _times() -> Tensor:
    return torch.tensor([3, 7])


def _diffusers(name: str, *inputs: Any, **options: Any) -> Built:
    return Built(getattr(load("diffusers"), name)(**options), (), dict(*inputs))


def _unet2d() -> Built:
    return _diffusers(
        "UNet2DModel", {"sample": _image(16), "timestep": _times()},
        sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip


def _unet2d_condition() -> Built:
    return _diffusers(
        "UNet2DConditionModel",
        {"sample": _image(16, 4), "timestep": _times(),
         "encoder_hidden_states": torch.randn(2, 6, 24)},
        sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        cross_attention_dim=24, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


def _dit() -> Built:
    return _diffusers(
        "DiTTransformer2DModel",
        {"hidden_states": _image(16, 4), "timestep": _times(), "class_labels": _times()},
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2,
        sample_size=16, patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip


def _sd3() -> Built:
    return _diffusers(
        "SD3Transformer2DModel",
        {"hidden_states": _image(16, 4), "encoder_hidden_states": torch.randn(2, 6, 32),
         "pooled_projections": torch.randn(2, 24), "timestep": _times()},
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=2,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        caption_projection_dim=32, pooled_projection_dim=24, pos_embed_max_size=16,
    )  # fmt: skip


def _flux() -> Built:
    return _diffusers(
        "FluxTransformer2DModel",
        {"hidden_states": torch.randn(2, 16, 8), "encoder_hidden_states": torch.randn(2, 6, 32),
         "pooled_projections": torch.randn(2, 24), "timestep": torch.tensor([0.3, 0.7]),
         "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)},
        patch_size=1, in_channels=8, num_layers=1, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=24,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def _autoencoder_kl() -> Built:
    return _diffusers(
        "AutoencoderKL", {"sample": _image(32), "sample_posterior": True},
        block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def _vq_model() -> Built:
    return _diffusers(
        "VQModel", {"sample": _image(32)},
        block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, latent_channels=4,
        num_vq_embeddings=32,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def _controlnet() -> Built:
    return _diffusers(
        "ControlNetModel",
        {"sample": _image(16, 4), "timestep": _times(),
         "encoder_hidden_states": torch.randn(2, 6, 24), "controlnet_cond": _image(128)},
        block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        cross_attention_dim=24, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    )  # fmt: skip


def _gaussian_diffusion() -> Built:
    package = load("denoising_diffusion_pytorch")
    unet = package.Unet(dim=16, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2)
    return Built(
        package.GaussianDiffusion(unet, image_size=16, timesteps=20), (torch.rand(2, 3, 16, 16),)
    )


def _gaussian_diffusion_1d() -> Built:
    package = load("denoising_diffusion_pytorch")
    unet = package.Unet1D(dim=16, dim_mults=(1, 2), channels=4)
    return Built(
        package.GaussianDiffusion1D(unet, seq_length=32, timesteps=20), (torch.rand(2, 4, 32),)
    )


def _karras_unet() -> Built:
    unet = load("denoising_diffusion_pytorch").KarrasUnet(
        image_size=16, dim=16, dim_max=32, channels=3, num_downsamples=1, num_blocks_per_stage=1,
        attn_res=(8,), attn_dim_head=8,
    )  # fmt: skip
    return Built(unet, (_image(16), torch.rand(2)))


MODELS: dict[str, Callable[[], Built]] = {
    "diffusers/UNet2DModel": _unet2d,
    "diffusers/UNet2DConditionModel": _unet2d_condition,
    "diffusers/DiTTransformer2DModel": _dit,
    "diffusers/SD3Transformer2DModel": _sd3,
    "diffusers/FluxTransformer2DModel": _flux,
    "diffusers/AutoencoderKL": _autoencoder_kl,
    "diffusers/VQModel": _vq_model,
    "diffusers/ControlNetModel": _controlnet,
    "denoising-diffusion-pytorch/GaussianDiffusion": _gaussian_diffusion,
    "denoising-diffusion-pytorch/GaussianDiffusion1D": _gaussian_diffusion_1d,
    "denoising-diffusion-pytorch/KarrasUnet": _karras_unet,
}
