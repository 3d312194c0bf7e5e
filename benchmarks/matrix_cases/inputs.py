"""Inputs for any model of transformers, from the names of its forward's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from matrix_cases.shrinking import FIRST_ORDINARY_TOKEN, IMAGE

__all__ = ["Recipe", "make_inputs", "recipes"]

BATCH = 3
TOKENS = 24
AUDIO_FRAMES = 64
AUDIO_SAMPLES = 6000

_IMAGES = ("pixel_values", "flattened_patches", "pixel_values_videos")
_SOUNDS = ("input_features", "input_values")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which of the inputs that a model accepts to give it, where there is a choice."""

    labels: bool
    images: bool
    layout: int = 0
    image_tokens: int = 0

    def __str__(self) -> str:
        """Say what deviates from giving everything."""
        parts = [] if self.labels else ["no labels"]
        if not self.images:
            parts.append("text only")
        return ", ".join(parts)


class _Maker:
    def __init__(self, model: nn.Module, config: Any, head: str, recipe: Recipe) -> None:
        self.config = config
        self.head = head
        self.recipe = recipe
        self.parameters = inspect.signature(model.forward).parameters
        self.text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.encoder_text = (
            config.get_text_config(encoder=True) if hasattr(config, "get_text_config") else config
        )

    def find(self, name: str, default: int) -> int:
        """Look for a number in the configuration and those inside of it."""
        places = [self.config, *(v for v in vars(self.config).values() if hasattr(v, "to_dict"))]
        for place in places:
            value = getattr(place, name, None)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default

    def tokens(self, length: int = TOKENS) -> Tensor:
        size = min(
            value
            for value in (
                getattr(self.text, "vocab_size", None) or 160,
                getattr(self.encoder_text, "vocab_size", None) or 160,
            )
            if isinstance(value, int)
        )
        first = FIRST_ORDINARY_TOKEN if size > FIRST_ORDINARY_TOKEN + 8 else min(4, size // 2)
        return torch.randint(first, size, (BATCH, length))

    def input_ids(self) -> Tensor:
        ids = self.tokens()
        image = self.find("image_token_id", self.find("image_token_index", -1))
        count = self.recipe.image_tokens
        if image >= 0 and count and self.recipe.images:
            ids = torch.cat([self.tokens(2), torch.full((BATCH, count), image), ids], dim=1)
        return ids

    def image(self) -> Tensor:
        channels = self.find("num_channels", self.find("in_channels", 3))
        size = self.find("image_size", IMAGE)
        channels = channels if channels <= 4 else 3
        if self.recipe.layout and "image_grid_thw" not in self.parameters:
            frames = self.find("num_frames", 2) if self.head.startswith("VIDEO") else 2
            return torch.randn(BATCH, max(1, frames), channels, size, size)
        if "image_grid_thw" in self.parameters:
            patch = self.find("patch_size", 8)
            area = patch * patch * self.find("temporal_patch_size", 1)
            return torch.randn(16 * BATCH, channels * area)
        return torch.randn(BATCH, channels, size, size)

    def waves(self) -> Tensor:
        """Make sound: samples, samples of one channel, or a spectrogram."""
        if self.recipe.layout == 0:
            return torch.randn(BATCH, AUDIO_SAMPLES)
        if self.recipe.layout == 1:
            return torch.randn(BATCH, 1, AUDIO_SAMPLES)
        frames = self.find("max_length", AUDIO_FRAMES)
        return torch.randn(BATCH, frames, self.find("num_mel_bins", 80))

    def sound_features(self) -> Tensor:
        mels = self.find("num_mel_bins", self.find("feature_size", self.find("input_dim", 80)))
        mels = self.find("input_feat_per_channel", mels)
        frames = 2 * self.find("max_source_positions", AUDIO_FRAMES // 2)
        frames = self.find("max_length", frames)
        shape = (BATCH, mels, frames) if self.recipe.layout == 0 else (BATCH, frames, mels)
        if self.recipe.layout == 2:
            shape = (BATCH, 1, frames, mels)  # type: ignore[assignment]
        return torch.randn(shape)

    def labels(self, inputs: dict[str, Any]) -> Any:
        head = self.head
        if head in ("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION"):
            return torch.randint(0, self.config.num_labels, (BATCH,))
        if head in ("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "INSTANCE_SEGMENTATION"):
            return [
                {
                    "class_labels": torch.randint(0, 2, (2,)),
                    "boxes": 0.25 + torch.rand(2, 4) / 4,
                    "masks": (torch.rand(2, IMAGE, IMAGE) > 0.5).float(),
                    "image_id": torch.tensor([1]),
                    "area": torch.rand(2),
                    "iscrowd": torch.zeros(2, dtype=torch.long),
                    "orig_size": torch.tensor([IMAGE, IMAGE]),
                    "size": torch.tensor([IMAGE, IMAGE]),
                }
                for _ in range(BATCH)
            ]
        if head == "SEMANTIC_SEGMENTATION":
            size = self.find("image_size", IMAGE)
            return torch.randint(0, self.config.num_labels, (BATCH, size, size))
        if head == "DEPTH_ESTIMATION":
            return None
        if head in ("CTC", "RNNT", "TDT"):
            return torch.randint(4, self.find("vocab_size", 32), (BATCH, 5))
        if head == "SEQUENCE_CLASSIFICATION":
            return torch.randint(0, self.config.num_labels, (BATCH,))
        if "decoder_input_ids" in self.parameters or "input_ids" not in inputs:
            return self.tokens(12)
        ids = inputs["input_ids"]
        return torch.where(ids >= min(FIRST_ORDINARY_TOKEN, int(ids.max())), ids, -100)

    def make(self) -> dict[str, Any]:
        """Make the inputs that are known by name, and those that are required."""
        inputs: dict[str, Any] = {}
        recipe = self.recipe
        has_text = "input_ids" in self.parameters
        for name, parameter in self.parameters.items():
            required = parameter.default is inspect.Parameter.empty and (
                parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            )
            if name in _IMAGES and not (recipe.images or not has_text):
                continue
            if name in _PLAIN:
                inputs[name] = _PLAIN[name](self)
            elif required and name in _REQUIRED:
                inputs[name] = _REQUIRED[name](self)
        if "labels" in self.parameters and recipe.labels:
            labels = self.labels(inputs)
            if labels is not None:
                inputs["labels"] = labels
        if recipe.labels and "mask_labels" in self.parameters:
            masks = [(torch.rand(2, IMAGE, IMAGE) > 0.5).float() for _ in range(BATCH)]
            inputs["mask_labels"] = masks
            inputs["class_labels"] = [torch.randint(0, 2, (2,)) for _ in range(BATCH)]
        if recipe.labels and "return_loss" in self.parameters and "labels" not in inputs:
            inputs["return_loss"] = True
        if inputs.get("input_ids") is not None and "attention_mask" in self.parameters:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "image_grid_thw" in self.parameters and "pixel_values" in inputs:
            inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * BATCH)
        sound = inputs.get("input_features")
        if sound is not None:
            for mask in ("input_features_mask", "feature_attention_mask"):
                if mask in self.parameters:
                    inputs[mask] = torch.ones(BATCH, sound.shape[-1], dtype=torch.long)
        if "mm_token_type_ids" in self.parameters and recipe.image_tokens:
            image = self.find("image_token_id", self.find("image_token_index", -1))
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == image).long()
        needs_decoder = "decoder_input_ids" in self.parameters and "labels" not in inputs
        if needs_decoder and getattr(self.config, "is_encoder_decoder", True):
            inputs["decoder_input_ids"] = self.tokens(12)
        return inputs


def _boxes(maker: _Maker) -> Tensor:
    corners = torch.randint(0, 100, (BATCH, TOKENS, 4))
    corners[..., 2:] += corners[..., :2]
    return corners


_PLAIN: dict[str, Callable[[_Maker], Any]] = {
    "input_ids": _Maker.input_ids,
    "pixel_values": _Maker.image,
    "input_features": _Maker.sound_features,
    "input_values": _Maker.waves,
    "bbox": _boxes,
}
_REQUIRED: dict[str, Callable[[_Maker], Any]] = {
    "pixel_values_videos": lambda maker: torch.randn(BATCH, 2, 3, IMAGE, IMAGE),
    "past_values": lambda maker: torch.randn(BATCH, maker.find("context_length", 32)),
    "past_time_features": lambda maker: torch.randn(BATCH, 32, 2),
    "past_observed_mask": lambda maker: torch.ones(BATCH, 32),
}


def recipes(parameters: Any) -> Iterator[Recipe]:
    """List what to try, the fullest first."""
    images = [True, False] if "input_ids" in parameters and set(_IMAGES) & set(parameters) else [
        True
    ]  # fmt: skip
    layouts = 3 if set(_SOUNDS) & set(parameters) else 2 if set(_IMAGES) & set(parameters) else 1
    for with_images in images:
        for labels in (True, False):
            for layout in range(layouts if with_images else 1):
                yield Recipe(labels, with_images, layout)


def make_inputs(model: nn.Module, config: Any, head: str, recipe: Recipe) -> dict[str, Any]:
    """Make a batch for a model; equal seeds make equal batches."""
    return _Maker(model, config, head, recipe).make()
