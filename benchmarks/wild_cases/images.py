"""Models of images and volumes: diffusion, segmentation, vision transformers, contrastive."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from matrix_cases.case import Built
from wild_cases.packages import load

__all__ = ["MODELS"]


def _image(size: int, channels: int = 3, batch: int = 2) -> Tensor:
    return torch.randn(batch, channels, size, size)


def _volume(size: int) -> Tensor:
    return torch.randn(1, 1, size, size, size)


def _times() -> Tensor:
    return torch.tensor([3, 7])


def _vit(name: str, module: str, image: Tensor | None = None, **options: Any) -> Built:
    model = getattr(load(f"vit_pytorch.{module}"), name)(**options)
    return Built(model, (_image(32) if image is None else image,))


_VIT: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32,
                        "depth": 2, "heads": 2, "mlp_dim": 64}  # fmt: skip


def _cct() -> Built:
    return _vit(
        "CCT", "cct", img_size=32, embedding_dim=32, n_conv_layers=1, kernel_size=3, stride=2,
        padding=1, pooling_kernel_size=3, pooling_stride=2, pooling_padding=1, num_layers=2,
        num_heads=2, mlp_ratio=2.0, num_classes=10, positional_embedding="learnable",
    )  # fmt: skip


def _max_vit() -> Built:
    return _vit(
        "MaxViT", "max_vit", _image(64), num_classes=10, dim_conv_stem=16, dim=16, dim_head=8,
        depth=(1, 1), window_size=4,
    )  # fmt: skip


def _cait() -> Built:
    return _vit(
        "CaiT", "cait", image_size=32, patch_size=8, num_classes=10, dim=32, depth=2, cls_depth=1,
        heads=2, mlp_dim=64, dropout=0.1, layer_dropout=0.2,
    )  # fmt: skip


def _monai(name: str, inputs: Tensor, **options: Any) -> Built:
    return Built(getattr(load("monai.networks.nets"), name)(**options), (inputs,))


def _monai_swin() -> Built:
    return _monai(
        "SwinUNETR", _image(64, 1, 1), spatial_dims=2, in_channels=1, out_channels=2,
        feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2), window_size=4,
    )  # fmt: skip


def _monai_dyn_unet() -> Built:
    return _monai(
        "DynUNet", _volume(16), spatial_dims=3, in_channels=1, out_channels=2,
        kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[8, 8, 16],
        deep_supervision=True, deep_supr_num=1, res_block=True,
    )  # fmt: skip


def _monai_autoencoder() -> Built:
    return _monai(
        "AutoencoderKL", _volume(16), spatial_dims=3, channels=(8, 16), num_res_blocks=1,
        attention_levels=(False, True), norm_num_groups=4,
    )  # fmt: skip


def _monai_diffusion() -> Built:
    model = load("monai.networks.nets").DiffusionModelUNet(
        spatial_dims=2, in_channels=1, out_channels=1, num_res_blocks=1, channels=(16, 32),
        attention_levels=(False, True), norm_num_groups=8, num_head_channels=8,
    )  # fmt: skip
    return Built(model, (_image(16, 1), _times()))


def _segmentation(name: str, encoder: str) -> Built:
    model = getattr(load("segmentation_models_pytorch"), name)(
        encoder_name=encoder, encoder_weights=None, classes=3
    )
    return Built(model, (_image(64),))


def _clip() -> Built:
    package = load("open_clip")
    vision = load("open_clip.model").CLIPVisionCfg(
        layers=2, width=32, head_width=16, patch_size=8, image_size=32
    )
    text = load("open_clip.model").CLIPTextCfg(
        context_length=12, vocab_size=64, width=32, heads=2, layers=2
    )
    model = package.CLIP(embed_dim=24, vision_cfg=vision, text_cfg=text)
    loss = package.ClipLoss()
    return Built(
        model, (_image(32, batch=4), torch.randint(0, 64, (4, 12))), loss=lambda out: loss(*out)
    )


def _coca() -> Built:
    package = load("open_clip")
    options = {"width": 32, "heads": 2, "layers": 1}
    text = {"context_length": 12, "vocab_size": 64, "embed_cls": True, "output_tokens": True}
    vision = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32,
              "attentional_pool": True, "attn_pooler_queries": 8, "attn_pooler_heads": 2,
              "output_tokens": True}  # fmt: skip
    model = package.CoCa(
        embed_dim=32, vision_cfg=vision, text_cfg=text | options,
        multimodal_cfg={"context_length": 12, "vocab_size": 64} | options,
    )  # fmt: skip
    nn.init.normal_(model.text_decoder.text_projection, std=0.1)  # which the package leaves empty
    return Built(model, (_image(32), torch.randint(1, 64, (2, 12))))


class _SimCLR(nn.Module):
    """Two views of each image through one backbone, projected, and their contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = load("lightly.models.modules").SimCLRProjectionHead(16, 32, 16)
        self.loss = load("lightly.loss").DCLLoss()

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.head(self.backbone(one)), self.head(self.backbone(other)))
        return loss


class _MoCo(_SimCLR):
    """The same with a momentum encoder and a memory bank."""

    def __init__(self) -> None:
        super().__init__()
        utils = load("lightly.models.utils")
        self.momentum_backbone = copy.deepcopy(self.backbone)
        self.momentum_head = copy.deepcopy(self.head)
        utils.deactivate_requires_grad(self.momentum_backbone)
        utils.deactivate_requires_grad(self.momentum_head)
        self.update = utils.update_momentum
        self.loss = load("lightly.loss").NTXentLoss(memory_bank_size=(32, 16))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        self.update(self.backbone, self.momentum_backbone, m=0.99)
        self.update(self.head, self.momentum_head, m=0.99)
        query = self.head(self.backbone(one))
        with torch.no_grad():
            key = self.momentum_head(self.momentum_backbone(other))
        loss: Tensor = self.loss(query, key)
        return loss


class _Barlow(_SimCLR):
    """The same with the loss of Barlow Twins."""

    def __init__(self) -> None:
        super().__init__()
        self.head = load("lightly.models.modules").BarlowTwinsProjectionHead(16, 32, 16)
        self.loss = load("lightly.loss").BarlowTwinsLoss()


def _views(kind: type[_SimCLR]) -> Built:
    return Built(kind(), (_image(16, batch=8), _image(16, batch=8)))


class _Augmented(nn.Module):
    """A convolution behind random changes of its images."""

    def __init__(self) -> None:
        super().__init__()
        kornia = load("kornia.augmentation")
        self.augment = kornia.AugmentationSequential(
            kornia.ColorJitter(0.1, 0.1, 0.1, 0.1, p=0.8),
            kornia.RandomAffine(20.0, p=0.8),
            kornia.RandomHorizontalFlip(p=0.5),
            data_keys=["input"],
        )
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
        )

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layers(self.augment(images))
        return found


class _Edges(nn.Module):
    """A learned image through blur, gradients and a structural loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1))
        self.kornia = load("kornia")

    def forward(self, images: Tensor) -> Tensor:
        found = self.layers(images)
        edges = self.kornia.filters.sobel(
            self.kornia.filters.gaussian_blur2d(found, (5, 5), (1, 1))
        )
        loss: Tensor = self.kornia.losses.ssim_loss(found, images, 5) + edges.square().mean()
        return loss


def _quantized(**options: Any) -> Built:
    package = load("vector_quantize_pytorch")
    kind = getattr(package, options.pop("kind"))

    class Quantized(nn.Module):
        """An encoder, a quantizer and a decoder."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 16))
            self.quantizer = kind(**options)
            self.decoder = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 24))

        def forward(self, values: Tensor) -> tuple[Tensor, ...]:
            quantized, *rest = self.quantizer(self.encoder(values))
            return (self.decoder(quantized), *rest)

    return Built(Quantized(), (torch.randn(4, 32, 24),))


def _metric(loss_name: str, **options: Any) -> Built:
    losses = load("pytorch_metric_learning.losses")

    class Embedded(nn.Module):
        """Embeddings and a loss of their pairs."""

        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16))
            self.loss = getattr(losses, loss_name)(**options)

        def forward(self, values: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = self.loss(self.trunk(values), labels)
            return loss

    return Built(Embedded(), (torch.randn(32, 24), torch.arange(32) % 4))


def _perceiver() -> Built:
    model = load("perceiver_pytorch").Perceiver(
        num_freq_bands=3, depth=2, max_freq=8.0, num_latents=8, latent_dim=32, latent_heads=2,
        cross_dim_head=16, latent_dim_head=16, num_classes=10,
    )  # fmt: skip
    return Built(model, (torch.randn(2, 12, 12, 3),))


def _mixer() -> Built:
    model = load("mlp_mixer_pytorch").MLPMixer(
        image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=10
    )
    return Built(model, (_image(32),))


def _g_mlp_vision() -> Built:
    model = load("g_mlp_pytorch").gMLPVision(
        image_size=32, patch_size=8, num_classes=10, dim=32, depth=3, prob_survival=0.7
    )
    return Built(model, (_image(32),))


def _axial() -> Built:
    model = load("axial_attention").AxialImageTransformer(
        dim=16, depth=2, heads=2, reversible=True, axial_pos_emb_shape=(8, 8)
    )
    return Built(model, (_image(8, 16),))


MODELS: dict[str, Callable[[], Built]] = {
    "vit-pytorch/ViT": lambda: _vit("ViT", "vit", **_VIT, dropout=0.1),
    "vit-pytorch/SimpleViT": lambda: _vit("SimpleViT", "simple_vit", **_VIT),
    "vit-pytorch/CaiT": _cait,
    "vit-pytorch/CCT": _cct,
    "vit-pytorch/MaxViT": _max_vit,
    "monai/UNet": lambda: _monai(
        "UNet",
        _volume(16),
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(8, 16, 32),
        strides=(2, 2),
        num_res_units=1,
    ),
    "monai/SegResNet": lambda: _monai("SegResNet", _volume(16), blocks_down=(1, 1), blocks_up=(1,)),
    "monai/DynUNet": _monai_dyn_unet,
    "monai/SwinUNETR": _monai_swin,
    "monai/AutoencoderKL": _monai_autoencoder,
    "monai/DiffusionModelUNet": _monai_diffusion,
    "segmentation-models-pytorch/Unet": lambda: _segmentation("Unet", "mobileone_s0"),
    "segmentation-models-pytorch/FPN": lambda: _segmentation("FPN", "timm-regnetx_002"),
    "segmentation-models-pytorch/DeepLabV3Plus": lambda: _segmentation(
        "DeepLabV3Plus", "timm-mobilenetv3_small_minimal_100"
    ),
    "segmentation-models-pytorch/Segformer": lambda: _segmentation("Segformer", "mit_b0"),
    "open_clip_torch/CLIP": _clip,
    "open_clip_torch/CoCa": _coca,
    "lightly/SimCLR": lambda: _views(_SimCLR),
    "lightly/MoCo": lambda: _views(_MoCo),
    "lightly/BarlowTwins": lambda: _views(_Barlow),
    "kornia/AugmentationSequential": lambda: Built(_Augmented(), (torch.rand(4, 3, 24, 24),)),
    "kornia/ssim_loss": lambda: Built(_Edges(), (torch.rand(4, 3, 24, 24),)),
    "vector-quantize-pytorch/VectorQuantize": lambda: _quantized(
        kind="VectorQuantize", dim=16, codebook_size=32
    ),
    "vector-quantize-pytorch/ResidualVQ": lambda: _quantized(
        kind="ResidualVQ", dim=16, codebook_size=32, num_quantizers=3, kmeans_init=False
    ),
    "vector-quantize-pytorch/FSQ": lambda: _quantized(kind="FSQ", dim=16, levels=[8, 5, 5]),
    "pytorch-metric-learning/TripletMarginLoss": lambda: _metric("TripletMarginLoss"),
    "pytorch-metric-learning/ArcFaceLoss": lambda: _metric(
        "ArcFaceLoss", num_classes=4, embedding_size=16
    ),
    "pytorch-metric-learning/SupConLoss": lambda: _metric("SupConLoss"),
    "perceiver-pytorch/Perceiver": _perceiver,
    "mlp-mixer-pytorch/MLPMixer": _mixer,
    "g-mlp-pytorch/gMLPVision": _g_mlp_vision,
    "axial-attention/AxialImageTransformer": _axial,
}
