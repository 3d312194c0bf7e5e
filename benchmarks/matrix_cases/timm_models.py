"""Families of image models of timm, each by its smallest, on small images."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from matrix_cases.case import Built, Case
from matrix_cases.stand_ins import stood_in

__all__ = ["FAMILIES", "case", "names"]

BATCH = 4
CLASSES = 10
FAMILIES: dict[str, dict[str, Any]] = {
    "resnet10t": {}, "resnetv2_18": {}, "seresnet18": {}, "test_resnet": {}, "skresnet18": {},
    "res2net50_14w_8s": {"layers": [1, 1, 1, 1]}, "resnext26ts": {}, "resnest14d": {},
    "regnetx_002": {}, "regnety_002": {}, "efficientnet_b0": {}, "mobilenetv2_035": {},
    "mobilenetv3_small_050": {}, "mobilenetv4_conv_small_035": {}, "mnasnet_small": {},
    "fbnetc_100": {}, "tinynet_e": {}, "ghostnet_050": {}, "lcnet_035": {}, "hardcorenas_a": {},
    "densenet121": {"block_config": (2, 2, 2, 2)}, "dla46_c": {}, "vgg11": {}, "repvgg_a0": {},
    "convnext_atto": {}, "convnextv2_atto": {},
    "nf_resnet26": {}, "eca_nfnet_l0": {"depths": (1, 1, 1, 1)}, "cspresnet50": {},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2}, "test_vit": {},
    "deit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 3},
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2},
    "mixer_s32_224": {"img_size": 64},
    "gmlp_ti16_224": {"img_size": 64},
    "resmlp_12_224": {"img_size": 64},
    "poolformer_s12": {}, "pvt_v2_b0": {}, "edgenext_xx_small": {}, "mobilevit_xxs": {},
    "mobilevitv2_050": {}, "efficientformer_l1": {}, "efficientvit_b0": {}, "fastvit_t8": {},
    "focalnet_tiny_srf": {},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (1, 1, 1), "embed_dim": 24,
                                     "num_heads": (2, 2, 2)},
    "crossvit_tiny_240": {"depth": [[1, 1, 0], [1, 1, 0], [1, 1, 0]]},
    "tf_efficientnetv2_b0": {}, "rexnet_100": {}, "inception_next_atto": {}, "starnet_s050": {},
}  # fmt: skip
_SIZES = {
    "crossvit_tiny_240": 240,
    "efficientformer_l1": 224,
    "densenet121": 64,
    "swin_tiny_patch4_window7_224": 56,
}


def names() -> list[str]:
    """List the models; none if timm is not installed."""
    return [f"timm/{name}" for name in FAMILIES] if find_spec("timm") else []


def _timm() -> Any:
    with stood_in():
        import timm  # noqa: PLC0415
    return timm


def _build(name: str) -> Built:
    options = FAMILIES[name]
    model = _timm().create_model(name, pretrained=False, num_classes=CLASSES, **options)
    model.train()
    size = _SIZES.get(name, 64)
    return Built(model, (torch.randn(BATCH, 3, size, size),))


def case(name: str) -> Case:
    """Make the case of one model.

    Raises:
        KeyError: if there is none.
    """
    if name not in FAMILIES or not find_spec("timm"):
        raise KeyError(name)

    def variants() -> list[tuple[str, Callable[[], Built]]]:
        return [("", functools.partial(_build, name))]

    return Case(f"timm/{name}", variants)
