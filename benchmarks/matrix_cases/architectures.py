"""What some architectures of transformers need beyond being shrunk by the names of their entries.

`ENTRIES` are entries of the configuration by dotted name, `INPUTS` what to give the model instead
of, or besides, what is made by name; `None` leaves an input out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ENTRIES", "HEADS", "INPUTS"]

HEADS: dict[str, str] = {
    "musicgen": "TEXT_TO_WAVEFORM",
    "musicgen_melody": "TEXT_TO_WAVEFORM",
}

_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1], "layer_type": "basic",
}  # fmt: skip


def _resnet(*stages: str) -> dict[str, Any]:
    backbone = {**_RESNET, "out_features": list(stages)} if stages else _RESNET
    return {"backbone_config": backbone, "backbone": None, "use_timm_backbone": False}


_MROPE = {"text_config.rope_parameters.mrope_section": [2, 1, 1]}

ENTRIES: dict[str, dict[str, Any]] = {
    "autoformer": {
        "lags_sequence": [1, 2],
        "context_length": 32,
        "feature_size": 6,
        "num_time_features": 2,
    },
    "bamba": {"attn_layer_indices": [1]},
    "bit": {"num_groups": 4},
    "bros": {"dim_bbox_sinusoid_emb_2d": 32, "dim_bbox_projection": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "efficientnet": {
        "width_coefficient": 0.25,
        "in_channels": [32, 16, 24, 40, 80, 112, 192],
        "out_channels": [16, 24, 40, 80, 112, 192, 320],
        "num_block_repeats": [1] * 7,
        "hidden_dim": 320,
    },
    "esm": {"pad_token_id": 0, "mask_token_id": 4, "emb_layer_norm_before": False},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "informer": {
        "lags_sequence": [1, 2],
        "context_length": 32,
        "feature_size": 6,
        "num_time_features": 2,
    },
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 2},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "time_series_transformer": {
        "lags_sequence": [1, 2],
        "context_length": 32,
        "feature_size": 6,
        "num_time_features": 2,
    },
    "bridgetower": {"text_config.num_attention_heads": 4, "num_attention_heads": 4},
    "colqwen2": {"vlm_config.text_config.rope_parameters.mrope_section": [2, 1, 1]},
    "conditional_detr": _resnet("stage4"),
    "dab_detr": _resnet("stage4"),
    "deformable_detr": _resnet("stage2", "stage3", "stage4"),
    "detr": _resnet("stage4"),
    "glm46v": _MROPE,
    "glm4v": _MROPE,
    "glm4v_moe": {"text_config.rope_parameters.mrope_section": [1, 1, 0]},
    "glm_image": _MROPE,
    "glm_ocr": _MROPE,
    "glmga": _MROPE,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "mamba2": {"head_dim": 16, "num_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl": _MROPE,
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "reformer": {"is_decoder": True},
    "table_transformer": _resnet("stage4"),
    "xlnet": {"d_head": 8},
    "xmod": {"default_language": "en_XX"},
}


def _series(config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Make a past, with what lags need before it, and a future, without further features."""
    past = config.context_length + max(config.lags_sequence)
    future = config.prediction_length
    return {
        "past_values": torch.randn(3, past),
        "past_time_features": torch.randn(3, past, config.num_time_features),
        "past_observed_mask": torch.ones(3, past),
        "future_values": torch.randn(3, future),
        "future_time_features": torch.randn(3, future, config.num_time_features),
    }


def _channels(config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Make a series of several channels, and the series to predict."""
    channels = config.num_input_channels
    found = {"past_values": torch.randn(3, config.context_length, channels)}
    if hasattr(config, "prediction_length") and "future_values" in inputs:
        found["future_values"] = torch.randn(3, config.prediction_length, channels)
    return {**found, "past_observed_mask": None}


def _decisions(config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Make a trajectory of a control problem."""
    return {
        "states": torch.randn(3, 10, config.state_dim),
        "actions": torch.randn(3, 10, config.act_dim),
        "rewards": torch.randn(3, 10, 1),
        "returns_to_go": torch.randn(3, 10, 1),
        "timesteps": torch.arange(10).expand(3, 10),
        "attention_mask": torch.ones(3, 10),
    }


def _scenes(config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Make features of regions of an image, with their places."""
    return {
        "visual_feats": torch.randn(3, 6, config.visual_feat_dim),
        "visual_pos": torch.rand(3, 6, config.visual_pos_dim),
    }


def _questions(config: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Put what the reader of images is asked beside the text."""
    return {"qformer_input_ids": torch.randint(64, 160, (3, 8))}


INPUTS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "autoformer": _series,
    "decision_transformer": _decisions,
    "informer": _series,
    "instructblip": _questions,
    "lxmert": _scenes,
    "patchtsmixer": _channels,
    "patchtst": _channels,
    "time_series_transformer": _series,
}
