"""A vision transformer of Hugging Face that classifies images; the loss is part of the output."""

from __future__ import annotations

import torch
from transformers import ViTConfig, ViTForImageClassification

from zoo.example import Example, Size

__all__ = ["build"]

# layers, width, heads, side of an image, batch
_SIZES = {"tiny": (2, 32, 2, 32, 2), "peers": (6, 192, 3, 96, 8), "medium": (6, 192, 3, 96, 8)}


def build(size: Size) -> Example:
    """Build one with patches of 8 x 8."""
    layers, width, heads, side, batch = _SIZES[size]
    config = ViTConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        intermediate_size=4 * width, image_size=side, patch_size=8, num_labels=10,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images, labels = torch.randn(batch, 3, side, side), torch.randint(10, (batch,))
    return Example(
        "vit",
        ViTForImageClassification(config),
        (images,),
        {"labels": labels},
        lambda output: output.loss,
    )
